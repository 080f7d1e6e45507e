"""The worker half: all bytes of one rank. Executes jobs and reports; decides nothing."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.facts import attention_names, device_of
from opal_connector.integrations.vllm.groups import ServedGroups, served_groups
from opal_connector.integrations.vllm.host_resources import CudaPins, process_cpus
from opal_connector.integrations.vllm.layout import (
    LayerCache,
    UnsupportedLayoutError,
    block_views,
)
from opal_connector.integrations.vllm.messages import OpalStepJobs, OpalStepResults, WorkerFacts
from opal_connector.integrations.vllm.paged_copy import GroupViews, paged_blocks
from opal_connector.integrations.vllm.replica_set import (
    ReplicaSet,
    VllmRanks,
    borrowed_job,
    is_replicated,
    join_replica_set,
)
from opal_connector.integrations.vllm.worker_tiers import pool_bytes, worker_tiers
from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers import Job, Mover
from opal_connector.transfers import DropJob, FailureKind, JobResult, LoadJob, TierHealth

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)


_IDLE_WAIT_SECONDS = 0.001


class FinishedLoads(NamedTuple):
    """Requests whose load has ended, and those of them that must compute everything again."""

    finished: set[str]
    failed: set[str]


class WorkerHalf:
    """One rank's pool, copier and transfer threads.

    Where several ranks have the same KV, one of them stores: see `replica_set`.

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
        self._fails_by_block = True
        self._is_holder = True
        self._health: tuple[TierHealth, ...] = ()

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Build the copier and the pool for these tensors."""
        served = served_groups(self._vllm_config, self._kv_cache_config)
        if isinstance(served, str):
            self._join_replicas(0, torch.device("cpu"))  # stages that see no fault wait for this
            self._facts = _refusing(self._rank, served)
            return
        block_count = self._kv_cache_config.num_blocks
        try:
            views = _group_views(served, kv_caches, block_count)
        except UnsupportedLayoutError as error:
            self._join_replicas(0, torch.device("cpu"))  # the others wait for this rank
            self._facts = _refusing(self._rank, str(error))
            return
        paged = paged_blocks(views, block_count)
        backend, isa = attention_names(self._vllm_config, served)
        self._fails_by_block = served.is_plain
        replicas = self._join_replicas(paged.row_bytes, device_of(kv_caches))
        self._is_holder = replicas is None or replicas.is_holder
        tiers = worker_tiers(
            self._config,
            row_bytes=paged.row_bytes,
            rank=self._rank,
            local_ranks=self._local_ranks,
            device=device_of(kv_caches),
            replicas=replicas,
        )
        if tiers:
            self._mover = Mover(
                [tier.store for tier in tiers],
                paged,
                rank=self._rank,
                lanes=[tier.lane for tier in tiers],
                cpus=process_cpus(),
            )
        self._facts = WorkerFacts(
            rank=self._rank,
            block_count=block_count,
            row_bytes=paged.row_bytes,
            tier_bytes={tier.name: tier.capacity_bytes for tier in tiers},
            kv_layout=str(getattr(self._vllm_config.cache_config, "kv_cache_layout", "unknown")),
            attention_backend=backend,
            cpu_isa=isa,
            page_format=served.page_format,
            storage_rank=self._rank if replicas is None else replicas.stage,
            is_holder=self._is_holder,
        )

    @property
    def _local_ranks(self) -> int:
        return max(1, int(self._vllm_config.parallel_config.world_size))

    def _join_replicas(self, row_bytes: int, device: torch.device) -> ReplicaSet | None:
        """Share one store with the ranks that have the same KV. Blocks until all have come.

        All ranks of a model with MLA come, also those that see no reason to: their stage may lack
        the layers that speak against it.
        """
        parallel = self._vllm_config.parallel_config
        if parallel.tensor_parallel_size == 1 or not self._vllm_config.model_config.use_mla:
            return None
        if not self._config.kvc_tiers:
            return None
        ranks = VllmRanks()
        return join_replica_set(
            ranks,
            stage=self._rank // ranks.size,
            row_bytes=row_bytes if is_replicated(self._kv_cache_config) else 0,
            pool_bytes=pool_bytes(self._config, local_ranks=self._local_ranks, set_size=ranks.size),
            pins=CudaPins() if device.type == "cuda" else None,
        )

    @property
    def facts(self) -> WorkerFacts | None:
        """What this worker has, after `register_kv_caches`."""
        return self._facts

    def start_loads(self, step: OpalStepJobs) -> None:
        """Open the tiers of files once; queue loads and whatever needs no new KV.

        Every job will be reported, whatever becomes of it.
        """
        if self._mover is None:
            return
        if step.namespace:
            self._mover.open(step.namespace)
        jobs: list[Job] = [*step.jobs.loads, *step.jobs.drops, *step.jobs.copies]
        for job in jobs:
            self._submit(job)
        if self._is_holder:
            self._mover.touch(step.jobs.touches)

    def start_stores(self, step: OpalStepJobs) -> None:
        """Queue stores; their blocks are complete now."""
        for job in step.jobs.stores:
            self._submit(job)

    def take_finished_loads(self, *, is_idle: bool = False) -> FinishedLoads:
        """Requests whose load ended since the last call, well or not.

        Of a dense model, what could not be filled is said in blocks, see `take_load_errors`. With
        several kinds of attention, or one that does not look back on everything, a part of a load
        is worth nothing: the request is said to have failed.

        In a step that computes nothing it waits a moment for a job in motion: on a CPU, an engine
        that goes round and round takes the cores that the copy needs.
        """
        loads = FinishedLoads(set(), set())
        if self._mover is None:
            return loads
        if is_idle:
            self._mover.wait_for_result(_IDLE_WAIT_SECONDS)
        for job, result in self._mover.take_results():
            self._results.append(result)
            if isinstance(job, LoadJob):
                loads.finished.add(job.request_id)
                errors = set(job.missing_block_ids)
                for position in result.failed:
                    errors.update(job.objects[position].block_ids)
                if self._fails_by_block:
                    self._load_errors |= errors
                elif errors or result.failed:
                    loads.failed.add(job.request_id)
        return loads

    def take_load_errors(self) -> set[int]:
        """Blocks that could not be filled, since the last call."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_results(self) -> OpalStepResults | None:
        """Results for the books, since the last call."""
        if self._mover is None:
            return None
        pages, health = self._mover.take_pages(), self._mover.health
        if not (self._results or pages) and health == self._health:
            return None
        changed = {self._rank: health} if health != self._health else {}
        self._health = health
        results, self._results = self._results, []
        return OpalStepResults(results, pages, changed)

    def close(self) -> None:
        """End the transfer threads; waits a few seconds at most."""
        if self._mover is not None and not self._mover.close():
            logger.warning("a transfer thread did not end in time and is left behind")

    def _submit(self, job: Job) -> None:
        assert self._mover is not None
        if not self._is_holder:
            if isinstance(job, LoadJob) and job.kept_job_id:  # copies in which it has no part
                self._mover.refuse(None, JobResult(job.kept_job_id, self._rank))
            job = borrowed_job(job)
        try:
            self._mover.submit(job)
        except Exception as error:  # noqa: BLE001 - a job without a result would hang its request
            warnings.warn("submit", "a transfer could not be started: %r", error)
            count = job.object_count if isinstance(job, DropJob) else len(job.objects)
            failed = dict.fromkeys(range(count), FailureKind.IO)
            self._mover.refuse(job, JobResult(job.job_id, self._rank, failed))
            if isinstance(job, LoadJob) and job.kept_job_id:
                self._mover.refuse(None, JobResult(job.kept_job_id, self._rank, failed))


def _group_views(
    served: ServedGroups, kv_caches: Mapping[str, LayerCache], block_count: int
) -> GroupViews:
    """Where the blocks of every served kv group are; a rank may have no layer of one."""
    views = {}
    for kv_group, page_bytes in served.page_bytes.items():
        caches = {name: kv_caches[name] for name in page_bytes if name in kv_caches}
        views[kv_group] = block_views(caches, page_bytes, block_count)
    if not any(views.values()):
        raise UnsupportedLayoutError("this rank has no KV tensor of a layer that is cached")
    return views


def _refusing(rank: int, reason: str) -> WorkerFacts:
    return WorkerFacts(
        rank=rank,
        block_count=0,
        row_bytes=0,
        tier_bytes={},
        kv_layout="",
        attention_backend="",
        cpu_isa="",
        refusal=reason,
    )
