"""A tier without its library ends vLLM's start in every process, before a model is loaded."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from kv_models import full, grouped, vllm_config
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from opal_connector.config import ConfigError
from opal_connector.integrations.vllm import plugin
from opal_connector.integrations.vllm.connector import OpalConnector

pytestmark = pytest.mark.vllm

SAID = r"Valkey: the Python package 'redis' is missing: pip install 'opal-connector\[valkey\]'"
TRANSFER = KVTransferConfig(
    kv_connector="OpalConnector",
    kv_role="kv_both",
    kv_connector_extra_config={
        "kvc_tiers": ["CPUMemory", "Valkey"],
        "Valkey": {"url": "redis://host"},
    },
)


@pytest.fixture(autouse=True)
def without_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "redis" else find(name, package),
    )


@pytest.mark.parametrize("role", KVConnectorRole)
def test_the_connector_of_both_roles_says_so(role: KVConnectorRole) -> None:
    """The worker's is made first, the scheduler's in another process."""
    settings: Any = vllm_config(layers={"layer": SimpleNamespace(head_size=32)})
    settings.kv_transfer_config = TRANSFER
    with pytest.raises(ConfigError, match=SAID):
        OpalConnector(settings, role, grouped({"layer": full()}))


def test_the_front_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the class while it puts its configuration together: no process is started yet."""
    find_class = KVConnectorFactory.get_connector_class
    found = getattr(find_class, "__wrapped__", find_class)
    factory = SimpleNamespace(get_connector_class=found)
    plugin._check_settings_early(factory)
    with pytest.raises(ConfigError, match=SAID):
        factory.get_connector_class(TRANSFER)
