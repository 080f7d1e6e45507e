"""`OpalConnector`: the facade that vLLM sees. One line per hook, no thought of its own.

vLLM makes one instance per role: in the engine core (SCHEDULER) and in every worker (WORKER). Each
holds its half and asserts that a hook of the other half is not called on it.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from opal_connector.config import load_config
from opal_connector.integrations.vllm.guard import guarded
from opal_connector.integrations.vllm.hybrid_manager import hybrid_manager_warning
from opal_connector.integrations.vllm.logs import show_log_lines
from opal_connector.integrations.vllm.messages import OpalHandshake, OpalStepJobs
from opal_connector.integrations.vllm.scheduler_half import SchedulerHalf, facts_of
from opal_connector.integrations.vllm.stats import OpalPromMetrics, OpalStats
from opal_connector.integrations.vllm.worker_half import WorkerHalf
from opal_connector.tiers.engines import check_engine_libraries

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)
_NOTHING = OpalStepJobs()


class OpalConnector(KVConnectorBase_V1, SupportsHMA):
    """KV cache of vLLM in Opal's tiers. See README for its configuration.

    With `SupportsHMA` vLLM keeps its hybrid memory manager on: every hook takes all kv groups.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        show_log_lines()
        assert vllm_config.kv_transfer_config is not None
        config = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine_libraries(config)
        self.scheduler_half: SchedulerHalf | None = None
        self.worker_half: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_half = SchedulerHalf(vllm_config, kv_cache_config, config)
            warning = hybrid_manager_warning(vllm_config, kv_cache_config)
            if warning is not None:
                logger.warning("%s", warning)
        else:
            self.worker_half = WorkerHalf(vllm_config, kv_cache_config, config)

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self.scheduler_half is not None, "this is the worker's connector"
        return self.scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self.worker_half is not None, "this is the scheduler's connector"
        return self.worker_half

    @property
    def _step(self) -> OpalStepJobs:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, OpalStepJobs) else _NOTHING

    # ---- class level ----

    @property
    @override
    def requires_kv_delivery(self) -> bool:
        return False  # a store that is dropped is a later miss, nothing more

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return False

    @classmethod
    @override
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return OpalStats(data) if data is not None else OpalStats()

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return OpalPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker ----

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    @override
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        facts = self._worker.facts
        return OpalHandshake(facts) if facts is not None else None

    @override
    @guarded(lambda: None)
    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        self._worker.start_loads(self._step)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    @override
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        return

    @override
    @guarded(lambda: None)
    def wait_for_save(self) -> None:
        self._worker.start_stores(self._step)

    @override
    @guarded(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loads = self._worker.take_finished_loads(is_idle=self._step.is_idle)
        return KVConnectorTransferResults(
            finished_recving=loads.finished, failed_recving=loads.failed
        )

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)  # vLLM itself asks for these
        return None, results.finished_recving or None

    @override
    @guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_load_errors()

    @override
    @guarded(lambda: None)
    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_results()

    # ---- scheduler ----

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    @override
    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.start(facts_of(metadata))

    @override
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._scheduler.start(facts_of(metadata))

    @override
    @guarded(lambda: None)
    def on_new_request(self, request: "Request") -> None:
        self._scheduler.add_request(request)

    @override
    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    @override
    @guarded(lambda: None)
    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @override
    @guarded(dict)
    def get_external_cache_hit_sources(
        self, request: "Request", num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        return self._scheduler.hit_sources(request, num_external_tokens)

    @override
    @guarded(OpalStepJobs)
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.plan_step(scheduler_output)

    @override
    @guarded(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.take_output(connector_output)

    @override
    @guarded(lambda: (False, None))
    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish(request, (block_ids,))

    @override
    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finish(request, block_ids)

    @override
    def register_finished_partial_tail(
        self,
        request: "Request",
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        return False  # whole blocks only: a tail inside a block has no hash of ours to be named by

    @override
    @guarded(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._scheduler.take_events()

    @override
    @guarded(lambda: False)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_blocks_soon()

    @override
    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work()

    @override
    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # ---- both ----

    @override
    @guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self.scheduler_half.take_stats() if self.scheduler_half is not None else None

    @override
    @guarded(lambda: None)
    def shutdown(self) -> None:
        if self.scheduler_half is not None:
            self.scheduler_half.close()
        if self.worker_half is not None:
            self.worker_half.close()
