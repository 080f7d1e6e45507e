"""A library that is not installed is told when the configuration is read, in one sentence."""

import importlib.util
import sys
from typing import Any

import pytest

from opal_connector.config import ConfigError, load_config
from opal_connector.tiers.engines import check_engine_libraries

SETTINGS: dict[str, dict[str, Any]] = {
    "ObjectStore": {"url": "s3://bucket/prefix"},
    "Valkey": {"url": "redis://host"},
    "Mooncake": {"master": "host:1", "metadata": "P2PHANDSHAKE"},
}
PACKAGES = [
    ("ObjectStore", "obstore", "obstore", "object-store"),
    ("Valkey", "redis", "redis", "valkey"),
    ("Valkey", "hiredis", "hiredis", "valkey"),
    ("Mooncake", "mooncake", "mooncake-transfer-engine-non-cuda", "mooncake"),
]


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Make these modules look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name in modules else find(name, package),
    )


def check(name: str, environment: dict[str, str] | None = None, **changes: Any) -> None:
    extra = {"kvc_tiers": ["CPUMemory", name], name: {**SETTINGS[name], **changes}}
    check_engine_libraries(load_config(extra), environment or {})


@pytest.mark.parametrize(("tier", "module", "package", "extra"), PACKAGES)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tier: str, module: str, package: str, extra: str
) -> None:
    """And only tiers that are used need one."""
    check(tier)
    hide(monkeypatch, module)
    for other in SETTINGS.keys() - {tier}:
        check(other)
    check_engine_libraries(load_config({tier: SETTINGS[tier]}), {})
    with pytest.raises(ConfigError) as caught:
        check(tier)
    assert str(caught.value) == (
        f"{tier}: the Python package {package!r} is missing: pip install 'opal-connector[{extra}]'"
    )


def test_a_profile_needs_a_library_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are keys it is not read, and other clouds know none."""
    hide(monkeypatch, "boto3")
    profile = {"AWS_PROFILE": "work"}
    with pytest.raises(ConfigError, match=r"'boto3' is missing, which reads the profile"):
        check("ObjectStore", profile)
    check("ObjectStore")
    check("ObjectStore", {**profile, "AWS_ACCESS_KEY_ID": "key"})
    check("ObjectStore", profile, options={"AWS_access_key_id": "key"})
    check("ObjectStore", profile, url="gs://bucket")


def test_nothing_is_loaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them start threads when they are imported."""
    loaded = {module for _, module, _, _ in PACKAGES}
    for module in loaded:
        monkeypatch.delitem(sys.modules, module, raising=False)
    for name in SETTINGS:
        check(name)
    assert loaded.isdisjoint(sys.modules)
