"""Messages about a configuration end up in logs: they repeat nothing that may be a secret."""

from pathlib import Path
from typing import Any

import pytest

from opal_connector.config import ConfigError, load_config
from opal_connector.config.shown import plain_address, shown

SECRET = "hunter2"


def message(extra: dict[str, Any]) -> str:
    """The error that a configuration is answered with."""
    with pytest.raises(ConfigError) as caught:
        load_config(extra)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        # Addresses that are wrong, or whose secret is the mistake.
        ("Valkey", {"url": f"http://user:{SECRET}@host"}, "found 'http://host'"),
        ("Valkey", {"url": f"redis://:{SECRET}@host:6379/opal"}, "a database"),
        ("Valkey", {"url": f"redis://:a/{SECRET}@host:6379/x"}, "Valkey.url"),
        ("Valkey", {"url": f"redis://:a@{SECRET}/b@host:x/0"}, "Valkey.url"),
        ("Valkey", {"url": f"redis://host:{SECRET}"}, "found 'redis://…'"),
        ("Valkey", {"url": f"host:6379?password={SECRET}"}, "found 'host:6379/…'"),
        ("Valkey", {"url": f"http://host?password=a@{SECRET}"}, "found 'http://…'"),
        ("Valkey", {"url": f"{SECRET}@host"}, "found 'host'"),
        ("ObjectStore", {"url": f"s3://AKIA:{SECRET}@bucket"}, "found 's3://bucket'"),
        ("ObjectStore", {"url": f"gs://{SECRET}@bucket/p"}, "found 'gs://bucket/…'"),
        ("ObjectStore", {"url": f"az://container/p?sv=1&sig={SECRET}"}, "found 'az://container/…'"),
        ("ObjectStore", {"url": f"abfss://c:{SECRET}@a.dfs.core.windows.net/p"}, "without cred"),
        ("Mooncake", {"master": f"u:{SECRET}@h:1", "metadata": "P2PHANDSHAKE"}, "found 'h:1'"),
        ("Mooncake", {"master": "h:1", "metadata": f"ftp://u:{SECRET}@h/m"}, "found 'ftp://h/…'"),
        # Options, whose values are of any kind.
        ("ObjectStore", {"options": {"aws_endpoint": f"u:{SECRET}@h"}}, "options.aws_endpoint"),
        ("ObjectStore", {"options": {"endpoint": f"http://u:{SECRET}@h"}}, "found 'http://h'"),
        ("ObjectStore", {"options": {"allow_http": SECRET}}, "options.allow_http"),
        ("ObjectStore", {"options": {"key": [SECRET]}}, "expected `str`, got `array`"),
        ("ObjectStore", {"options": f"aws_secret_access_key={SECRET}"}, "expected `object`"),
        ("ObjectStore", {"options": SECRET}, "a value of type str"),
        ("ObjectStore", {"options": [{"key": SECRET}]}, "expected `object`, got `array`"),
        # Values in the wrong place.
        ("ObjectStore", {"url": {"key": SECRET}}, "ObjectStore.url: found {'key': …}"),
        ("Valkey", {"url": [f"redis://:{SECRET}@host"]}, "expected `str | null`, got `array`"),
        ("Valkey", f"redis://:{SECRET}@host", "Valkey: found 'redis://host'"),
        ("Valkey", [{"url": f"redis://:{SECRET}@host"}], "expected `object`, got `array`"),
        ("chunk_size", {"url": SECRET}, "chunk_size: found {'url': …}"),
        ("kvc_tiers", {"Valkey": {"url": SECRET}}, "kvc_tiers: found {'Valkey': …}"),
        ("opal_config", {"Valkey": {"url": SECRET}}, "opal_config: found {'Valkey': …}"),
    ],
)
def test_a_mistake_is_told_without_the_secret(name: str, settings: Any, told: str) -> None:
    """Of an address the scheme and the host are told, of other values what kind they are."""
    found = message({"kvc_tiers": ["CPUMemory", name], name: settings})

    assert SECRET not in found
    assert told in found


@pytest.mark.parametrize(
    "extra",
    [
        {"kvc_tiers": ["CPUMemory", f"redis://:{SECRET}@host"]},
        {"chunk_size": f"redis://:{SECRET}@host"},
        {"instance_id": f"redis://:{SECRET}@host" + 128 * "/"},
        {"CPUMemory": {"capacity_GB": f"redis://:{SECRET}@host"}},
        {"Valkey": {"prefix": f"redis://:{SECRET}@host"}},
        {"Valkey": {"shared_name": f"redis://:{SECRET}@host" + 128 * "/"}},
        {"Mooncake": {"segment_GB": f"redis://:{SECRET}@host"}},
    ],
)
def test_an_address_in_another_field_is_told_without_the_secret(extra: dict[str, Any]) -> None:
    """It is one wherever it stands."""
    found = message(extra)
    assert SECRET not in found
    assert "redis://host" in found


def test_a_number_in_options_is_not_repeated() -> None:
    """A key of digits alone is a number in YAML."""
    found = message({"ObjectStore": {"url": "s3://b", "options": {"account_key": 20071969}}})

    assert "2007" not in found
    assert "ObjectStore.options" in found
    assert "expected `str`, got `int`" in found


@pytest.mark.parametrize("field", ["url", "metadata"])
def test_a_number_for_an_address_is_told_by_its_type(field: str) -> None:
    """It may be a password in the wrong line."""
    name = {"url": "Valkey", "metadata": "Mooncake"}[field]
    found = message({name: {field: 20071969}})

    assert found.startswith(f"{name}.{field}: found a value of type int; expected `str | null`")


@pytest.mark.parametrize("line", ["  url: *hunter2", "  url: !hunter2 x", "  url: 'hunter2"])
def test_a_file_that_cannot_be_read_is_not_quoted(tmp_path: Path, line: str) -> None:
    """Where the mistake is, and not what stands there."""
    (tmp_path / "opal.yaml").write_text(f"Valkey:\n{line}\n  prefix: [\n")
    found = message({"opal_config": str(tmp_path / "opal.yaml")})

    assert SECRET not in found
    assert "neither JSON nor YAML: line " in found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("redis://host:6379", "redis://host:6379"),
        ("redis://user:word@[::1]:6379/0", "redis://[::1]:6379/…"),
        ("rediss://host?password=word", "rediss://host/…"),
        ("unix:///run/valkey", "unix://…"),
        ("redis://:a#b@host", "redis://…"),
        ("redis://:a@b@host", "redis://…"),
        ("", ""),
    ],
)
def test_an_address_is_its_scheme_and_host(text: str, told: str) -> None:
    """Nothing is told where a badly written password may look like a host."""
    assert plain_address(text) == told


def test_harmless_values_are_repeated_as_they_are() -> None:
    """A message that tells nothing helps nobody."""
    assert shown(["a", 2, None], "kvc_tiers") == "['a', 2, None]"
    assert shown(("a",)) == "('a',)"
    assert shown(None, "Valkey.url") == "None"
    assert shown({}) == "{}"
