"""The worker half: all bytes of one rank. Executes jobs and reports; decides nothing."""

import logging
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from opal_connector.config import OpalConfig, parse_size_bytes
from opal_connector.integrations.vllm.facts import attention_names, device_of, group_facts
from opal_connector.integrations.vllm.host_resources import (
    available_memory_bytes,
    pinned_host_rows,
    process_cpus,
)
from opal_connector.integrations.vllm.layout import UnsupportedLayoutError, block_views
from opal_connector.integrations.vllm.messages import OpalStepResults, WorkerFacts
from opal_connector.integrations.vllm.paged_copy import paged_blocks
from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers import CPUMemory, Mover, PagedBlocks, TierStore, allocate_host_rows
from opal_connector.transfers import FailureKind, JobBatch, JobResult, LoadJob, StoreJob

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_DEFAULT_SHARE = 0.25
_DEFAULT_LIMIT_BYTES = 8 << 30


class WorkerHalf:
    """One rank's pool, copier and transfer threads.

    Mutable state: the results and load errors not yet handed to vLLM, used by the worker's main
    thread only; the mover guards its own. Without a mover (a model that cannot be served) every
    hook is a no-op.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: OpalConfig
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._rank = vllm_config.parallel_config.rank
        self._mover: Mover | None = None
        self._facts: WorkerFacts | None = None
        self._results: list[JobResult] = []
        self._load_errors: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Build the copier and the pool for these tensors."""
        group = group_facts(self._vllm_config, self._kv_cache_config)
        if isinstance(group, str):
            self._facts = _refusing(self._rank, group)
            return
        caches = {name: kv_caches[name] for name in group.page_bytes if name in kv_caches}
        block_count = self._kv_cache_config.num_blocks
        try:
            views = block_views(caches, group.page_bytes, block_count)
        except UnsupportedLayoutError as error:
            self._facts = _refusing(self._rank, str(error))
            return
        paged = paged_blocks(views, block_count)
        backend, isa = attention_names(self._vllm_config, next(iter(caches)))
        tiers: list[TierStore] = []
        tier_rows: dict[str, int] = {}
        for name in self._config.kvc_tiers:
            rows = self._row_count(name, paged)
            tier_rows[name] = rows
            tiers.append(self._make_tier(rows, paged, device_of(caches)))
        threads = max((self._config.tier(name).concurrency for name in tier_rows), default=1)
        if tiers:
            self._mover = Mover(tiers, paged, rank=self._rank, threads=threads, cpus=process_cpus())
        self._facts = WorkerFacts(
            rank=self._rank,
            block_count=block_count,
            row_bytes=paged.row_bytes,
            tier_rows=tier_rows,
            kv_layout=str(getattr(self._vllm_config.cache_config, "kv_cache_layout", "unknown")),
            attention_backend=backend,
            cpu_isa=isa,
        )

    @property
    def facts(self) -> WorkerFacts | None:
        """What this worker has, after `register_kv_caches`."""
        return self._facts

    def start_loads(self, jobs: JobBatch) -> None:
        """Queue loads. Every one will be reported, whatever becomes of it."""
        for job in jobs.loads:
            self._submit(job)

    def start_stores(self, jobs: JobBatch) -> None:
        """Queue stores; their blocks are complete now."""
        for job in jobs.stores:
            self._submit(job)

    def take_finished_loads(self) -> set[str]:
        """Requests whose load ended since the last call, well or not."""
        finished: set[str] = set()
        if self._mover is None:
            return finished
        for job, result in self._mover.take_results():
            self._results.append(result)
            if isinstance(job, LoadJob):
                finished.add(job.request_id)
                self._load_errors.update(job.missing_block_ids)
                for position in result.failed:
                    self._load_errors.update(job.objects[position].block_ids)
        return finished

    def take_load_errors(self) -> set[int]:
        """Blocks that could not be filled, since the last call."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_results(self) -> OpalStepResults | None:
        """Results for the books, since the last call."""
        if not self._results:
            return None
        results, self._results = self._results, []
        return OpalStepResults(results)

    def close(self) -> None:
        """End the transfer threads; waits a few seconds at most."""
        if self._mover is not None and not self._mover.close():
            logger.warning("a transfer thread did not end in time and is left behind")

    def _submit(self, job: LoadJob | StoreJob) -> None:
        assert self._mover is not None
        try:
            self._mover.submit(job)
        except Exception as error:  # noqa: BLE001 - a job without a result would hang its request
            warnings.warn("submit", "a transfer could not be started: %r", error)
            failed = dict.fromkeys(range(len(job.objects)), FailureKind.IO)
            self._mover.refuse(job, JobResult(job.job_id, self._rank, failed))

    def _row_count(self, name: str, paged: PagedBlocks) -> int:
        capacity = self._config.tier(name).capacity_GB
        if capacity is not None:
            capacity_bytes = parse_size_bytes(capacity)
        else:
            local_ranks = max(1, self._vllm_config.parallel_config.world_size)
            share = int(available_memory_bytes() * _DEFAULT_SHARE / local_ranks)
            capacity_bytes = min(_DEFAULT_LIMIT_BYTES, share)
        return capacity_bytes // paged.row_bytes

    def _make_tier(self, rows: int, paged: PagedBlocks, device: torch.device) -> TierStore:
        if device.type == "cpu":
            return CPUMemory(allocate_host_rows(row_count=rows, row_bytes=paged.row_bytes))
        return CPUMemory(pinned_host_rows(row_count=rows, row_bytes=paged.row_bytes))


def _refusing(rank: int, reason: str) -> WorkerFacts:
    return WorkerFacts(
        rank=rank,
        block_count=0,
        row_bytes=0,
        tier_rows={},
        kv_layout="",
        attention_backend="",
        cpu_isa="",
        refusal=reason,
    )
