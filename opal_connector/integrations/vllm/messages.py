"""What the two halves say to each other through vLLM. Everything here is pickled between processes.

The classes must be subclasses of vLLM's; their contents are msgspec Structs.
"""

from dataclasses import dataclass, field

import msgspec
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from opal_connector.transfers import NO_JOBS, InventoryPage, JobBatch, JobResult, TierHealth


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker really has: known only where the KV tensors are.

    `is_holder` says whether it stores, as `storage_rank`; otherwise it loads what another rank
    stores as that. `page_format` is that of `ServedGroups`. `refusal` says why this worker cannot
    serve, or is empty.
    """

    rank: int
    block_count: int
    row_bytes: int
    tier_bytes: dict[str, int]
    kv_layout: str
    attention_backend: str
    cpu_isa: str
    refusal: str = ""
    page_format: str = ""
    storage_rank: int = 0
    is_holder: bool = True


@dataclass
class OpalHandshake(KVConnectorHandshakeMetadata):
    """A worker's facts, once, before the first request."""

    facts: WorkerFacts


@dataclass
class OpalStepJobs(KVConnectorMetadata):
    """New jobs of one step, scheduler to every worker.

    `namespace` opens the tiers of files; it is sent once, as soon as the scheduler knows it.
    `is_idle` says that the step computes nothing.
    """

    jobs: JobBatch = NO_JOBS
    namespace: bytes = b""
    is_idle: bool = False


@dataclass
class OpalStepResults(KVConnectorWorkerMetadata):
    """Results of one step, workers to scheduler; one entry per job and rank.

    Besides them what tiers held before this process, and per rank the health of its tiers by
    place where that has changed.
    """

    results: list[JobResult] = field(default_factory=list)
    pages: list[InventoryPage] = field(default_factory=list)
    health: dict[int, tuple[TierHealth, ...]] = field(default_factory=dict)

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, OpalStepResults)
        return OpalStepResults(
            [*self.results, *other.results],
            [*self.pages, *other.pages],
            {**self.health, **other.health},
        )
