"""The connector fits the installed vLLM: every hook has vLLM's own signature, none is missing."""

import inspect
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
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
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import to_event_extra_keys
from vllm.v1.core.sched.scheduler import Scheduler

from opal_connector.integrations.vllm import connector, plugin
from opal_connector.integrations.vllm.connector import OpalConnector
from opal_connector.integrations.vllm.messages import OpalStepResults
from opal_connector.integrations.vllm.stats import OpalPromMetrics, OpalStats

pytestmark = pytest.mark.vllm

PAIRS = [
    (OpalConnector, KVConnectorBase_V1),
    (OpalConnector, SupportsHMA),
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
    *("build_connector_worker_meta", "get_handshake_metadata", "get_transfer_results"),
    *("request_finished_all_groups", "register_finished_partial_tail"),
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

    known = (KVConnectorBase_V1, SupportsHMA)
    assert {name for name in public if not any(hasattr(base, name) for base in known)} == set()
    assert public == HOOKS


@pytest.mark.parametrize("ours", [ours for ours, _ in PAIRS], ids=lambda cls: cls.__name__)
def test_nothing_abstract_is_left(ours: type) -> None:
    """VLLM can make an instance."""
    assert not inspect.isabstract(ours)


def test_several_groups_are_declared_by_the_class() -> None:
    """VLLM decides by the class whether a hybrid model keeps its memory manager."""
    assert issubclass(OpalConnector, SupportsHMA)


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
    assert KVConnectorFactory.supports_hma_config(config)


def test_the_device_tap_finds_what_it_relies_on() -> None:
    """The pool hands its own queue over through an attribute that an instance may replace."""
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    queue = pool.kv_event_queue
    assert (pool.take_events(), pool.enable_kv_cache_events) == ([], False)
    pool.enable_kv_cache_events = True
    assert pool.reset_prefix_cache()
    assert queue == [AllBlocksCleared()]
    assert pool.take_events() is queue
    assert pool.kv_event_queue == []
    assert pool.medium == MEDIUM_GPU
    assert 0 <= pool.get_usage() <= 1
    assert list(inspect.signature(pool.emit_cached_block_events).parameters) == [
        *("request", "num_cached_blocks", "block_size", "kv_cache_group_id"),
    ]
    assert list(inspect.signature(pool.cache_full_blocks).parameters) == [
        *("request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size"),
        *("kv_cache_group_id", "block_mask"),
    ]
    assert "self.block_pool.take_events()" in inspect.getsource(KVCacheManager.take_events)
    step = inspect.getsource(Scheduler.update_from_output)
    assert step.count("self.kv_cache_manager.take_events()") == 1
    assert step.count("self.connector.take_events()") == 1
    assert "has_pending_push_work" in inspect.getsource(Scheduler.has_requests)


def test_events_of_the_device_say_what_their_digests_need() -> None:
    """Fields of vLLM's events, and the order of the extra keys, that the chain is computed from."""
    assert {
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"),
        *("lora_name", "extra_keys", "group_idx"),
        *("kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    } <= set(BlockStored.__struct_fields__)
    assert {"block_hashes", "medium", "group_idx"} <= set(BlockRemoved.__struct_fields__)
    keys = (("lora", "tuned", "/path"), ("mm", "cat", -3), ("cache_salt", "pepper"))
    assert to_event_extra_keys([keys, None]) == [("tuned", ("cat", -3), "pepper"), None]
