"""What a user may write about a store that others run, and what he is told."""

from typing import Any

import pytest

from opal_connector.config import ConfigError, load_config

ADDRESSES: dict[str, dict[str, Any]] = {
    "ObjectStore": {"url": "s3://bucket/prefix"},
    "Mooncake": {"master": "host:50051", "metadata": "http://host:8080/metadata"},
    "Valkey": {"url": "redis://host:6379/0"},
}


def options(**given: str) -> dict[str, Any]:
    """The settings of a bucket with these options."""
    return {**ADDRESSES["ObjectStore"], "options": given}


def load(name: str, **settings: Any) -> Any:
    config = load_config({"kvc_tiers": ["CPUMemory", name], name: settings})
    found = config.shared_tier()
    assert found is not None
    assert found[0] == name
    return found[1]


@pytest.mark.parametrize("name", ADDRESSES)
def test_one_line_is_enough(name: str) -> None:
    """The address is all that a store needs."""
    assert load(name, **ADDRESSES[name]).timeout_seconds == 10.0


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("ObjectStore", {}, r"ObjectStore.url: found None, allowed: s3://BUCKET/PREFIX"),
        (
            "ObjectStore",
            {"url": "http://host/bucket"},
            r"ObjectStore.url: found 'http://host/…', all",
        ),
        ("Valkey", {"url": "host:6379"}, r"Valkey.url: found 'host:6379', allowed: redis://"),
        ("Mooncake", {"master": "host"}, r"Mooncake.master: found 'host', allowed: HOST:PORT"),
        ("Mooncake", {"master": "host:1"}, r"Mooncake.metadata: found None, allowed: the URL"),
        (
            "Mooncake",
            {**ADDRESSES["Mooncake"], "admin": "host"},
            r"Mooncake.admin: found 'host', a",
        ),
        ("Mooncake", {**ADDRESSES["Mooncake"], "replicas": 0}, r"Mooncake.replicas: found 0, all"),
        ("Valkey", {**ADDRESSES["Valkey"], "capacity_GB": 3}, r"Valkey.capacity_GB: found 3.*maxm"),
        ("Valkey", {**ADDRESSES["Valkey"], "prefix": "a b"}, r"Valkey.prefix: found 'a b', allowe"),
        (
            "ObjectStore",
            {**ADDRESSES["ObjectStore"], "ttl_seconds": 60},
            r"ObjectStore.ttl_seconds: found 60.*rules of the bucket",
        ),
        (
            "Mooncake",
            {**ADDRESSES["Mooncake"], "master": "h:99999"},
            r"Mooncake.master: found 'h:9",
        ),
        ("Mooncake", {**ADDRESSES["Mooncake"], "master": "h:0"}, r"Mooncake.master: found 'h:0', "),
        (
            "Mooncake",
            {**ADDRESSES["Mooncake"], "timeout_seconds": 1.9},
            r"Mooncake.timeout_seconds: found 1.9, allowed: 2 to 600, since its library waits",
        ),
        ("Valkey", {"url": "redis://host:99999/0"}, r"Valkey.url: found 'redis://host:99999/…'"),
        ("Valkey", {"url": "redis://host:0/0"}, r"Valkey.url: found 'redis://host:0/…', allowed"),
        ("Valkey", {"url": "redis:///0"}, r"Valkey.url: found .*, allowed: .*, with a host"),
        ("Valkey", {"url": "unix://"}, r"Valkey.url: found 'unix://…', allowed: redis://"),
        ("Valkey", {"url": "unix:///?db=1"}, r"Valkey.url: found .*, allowed: unix:///PATH"),
        ("ObjectStore", options(aws_endpoint="minio"), r"options.aws_endpoint: found 'minio', all"),
        ("ObjectStore", options(AWS_ENDPOINT_URL="h:9"), r"options.AWS_ENDPOINT_URL: found 'h:9',"),
        ("ObjectStore", options(azure_endpoint="http://"), r"options.azure_endpoint: found 'http"),
        ("ObjectStore", options(endpoint="http://h:99999"), r"options.endpoint: found 'http://h:9"),
        ("ObjectStore", options(base_url="ftp://h"), r"options.base_url: found 'ftp://h', allowed"),
        ("ObjectStore", options(allow_http="perhaps"), r"options.allow_http: found another text, "),
        ("ObjectStore", options(aws_Skip_Signature=""), r"Skip_Signature: found another text, all"),
        (
            "ObjectStore",
            {**ADDRESSES["ObjectStore"], "lookup_timeout_seconds": 9},
            r"ObjectStore.lookup_timeout_seconds: found 9.0, allowed: 0 to 5",
        ),
    ],
)
def test_a_mistake_names_the_field(name: str, settings: dict[str, Any], said: str) -> None:
    """In one sentence, with what is allowed."""
    with pytest.raises(ConfigError, match=said):
        load(name, **settings)


@pytest.mark.parametrize(
    "database", ["/opal", "/1x", "/-1", "/1/2", "?db=one", "?db=", "?db=1&db=2"]
)
def test_a_database_is_a_number(database: str) -> None:
    """The library takes what it cannot read for database 0, which is somebody else's."""
    with pytest.raises(ConfigError, match=r"Valkey.url: found a database that is no number"):
        load("Valkey", url=f"redis://host:6379{database}")


@pytest.mark.parametrize(
    "url",
    ["redis://h", "rediss://u:p%2F@h:1/15/?ssl_ca_certs=/x", "redis://[::1]:7/0?db=2", "unix:///s"],
)
def test_addresses_of_valkey_that_are_right(url: str) -> None:
    """In all the spellings that the library has."""
    assert load("Valkey", url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3a://b/p/q",
        "gs://b/",
        "az://c/p",
        "abfss://c@account.dfs.core.windows.net/p",
    ],
)
def test_addresses_of_buckets_that_are_right(url: str) -> None:
    """One form of Azure's has the account behind an @."""
    assert load("ObjectStore", url=url).url == url


@pytest.mark.parametrize("value", ["true", "FALSE", "1", "off", "Yes", "n"])
def test_a_switch_of_a_bucket_is_what_its_library_reads(value: str) -> None:
    """In its own spellings, since it is given to it as it is."""
    assert load("ObjectStore", **options(aws_unsigned_payload=value)).options


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_store_that_evicts_by_itself_has_no_policy(name: str) -> None:
    """A policy that has no effect is a mistake that nobody would find."""
    assert load(name, **ADDRESSES[name], eviction_policy="LRU")
    with pytest.raises(ConfigError, match=f"{name}.eviction_policy: found 'ARC', allowed: leave i"):
        load(name, **ADDRESSES[name], eviction_policy="ARC")


def test_instances_share_one_tier_at_most() -> None:
    """Two would be asked one after the other, for the same."""
    tiers = {"DistributedFS": {"path": "/shared"}, "Valkey": ADDRESSES["Valkey"]}
    with pytest.raises(ConfigError, match="found DistributedFS and Valkey, allowed: one tier"):
        load_config({"kvc_tiers": list(tiers), **tiers})
