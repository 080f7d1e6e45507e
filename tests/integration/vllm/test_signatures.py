"""The connector fits the installed vLLM: every hook has vLLM's own signature, none is missing."""

import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from opal_connector.integrations.vllm import connector, plugin
from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.messages import OpalStepResults
from opal_connector.integrations.vllm.stats import OpalPromMetrics, OpalStats

pytestmark = pytest.mark.vllm

PAIRS = [
    (OpalConnector, KVConnectorBase_V1),
    (OpalStepResults, KVConnectorWorkerMetadata),
    (OpalStats, KVConnectorStats),
    (OpalPromMetrics, KVConnectorPromMetrics),
]
# What reference/vllm-connector.md asks for. A hook that vLLM renames would fail here.
HOOKS = {
    *("requires_kv_delivery", "requires_piecewise_for_cudagraph", "build_kv_connector_stats"),
    *("build_prom_metrics", "bind_gpu_block_pool", "on_new_request", "request_finished"),
    *("get_num_new_matched_tokens", "get_external_cache_hit_sources", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output", "take_events", "has_pending_push_work"),
    *("has_pending_block_frees", "reset_cache", "get_kv_connector_stats", "shutdown"),
    *("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"),
    *("register_kv_caches", "start_load_kv", "wait_for_layer_load", "save_kv_layer"),
    *("wait_for_save", "get_finished", "get_block_ids_with_load_errors"),
    *("build_connector_worker_meta", "get_handshake_metadata"),
}


def overridden() -> Iterator[tuple[type, type, str]]:
    """Every public name that one of our classes shares with vLLM's."""
    for ours, theirs in PAIRS:
        for name in vars(ours):
            if not name.startswith("_") and hasattr(theirs, name):
                yield ours, theirs, name


def parameters(owner: type, name: str) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults; `requires_kv_delivery` and the like are properties."""
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        return []
    found = inspect.signature(getattr(owner, name)).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in found]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [pytest.param(*case, id=f"{case[0].__name__}.{case[2]}") for case in overridden()],
)
def test_hook_has_the_signature_of_vllm(ours: type, theirs: type, name: str) -> None:
    """The same parameters under the same names; class methods and properties stay what they are."""
    assert parameters(ours, name) == parameters(theirs, name)
    kinds = (classmethod, staticmethod, property)
    for kind in kinds:
        is_ours = isinstance(inspect.getattr_static(ours, name), kind)
        assert is_ours == isinstance(inspect.getattr_static(theirs, name), kind)


def test_every_public_method_of_the_connector_is_a_hook_of_vllm() -> None:
    """A method that vLLM does not have (any more) would never be called."""
    public = {name for name in vars(OpalConnector) if not name.startswith("_")}

    assert {name for name in public if not hasattr(KVConnectorBase_V1, name)} == set()
    assert public == HOOKS


@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS], ids=lambda cls: cls.__name__)
def test_nothing_abstract_is_left(ours: type) -> None:
    """VLLM can make an instance."""
    assert not inspect.isabstract(ours)


def test_one_group_only_is_declared_by_the_class() -> None:
    """VLLM decides by the class whether a hybrid model gets several groups."""
    assert not issubclass(OpalConnector, SupportsHMA)


def test_constructor_takes_what_the_factory_gives() -> None:
    """Three positional arguments, the third under the name that vLLM looks for."""
    names = list(inspect.signature(OpalConnector).parameters)

    assert names == list(inspect.signature(KVConnectorBase_V1).parameters)
    assert names[2] == "kv_cache_config"


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which the plugin has not run."""
    registry = dict(KVConnectorFactory._registry)
    registry.pop("OpalConnector", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)


def transfer_config(**more: str) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="OpalConnector", kv_role="kv_both", **more)


def test_short_name_needs_the_plugin_and_it_may_run_twice(unregistered: None) -> None:
    """The entry point registers the name once, however often it runs."""
    with pytest.raises(ValueError, match="Unsupported connector type"):
        KVConnectorFactory.get_connector_class(transfer_config())

    plugin.register()
    plugin.register()

    assert KVConnectorFactory.get_connector_class(transfer_config()) is OpalConnector
    assert KVConnectorFactory.get_connector_class_by_name("OpalConnector") is OpalConnector


@pytest.mark.parametrize("path", ["opal_connector", connector.__name__])
def test_module_path_needs_no_plugin(path: str, unregistered: None) -> None:
    """`kv_connector_module_path` is enough."""
    config = transfer_config(kv_connector_module_path=path)

    assert KVConnectorFactory.get_connector_class(config) is OpalConnector
    assert not KVConnectorFactory.supports_hma_config(config)
