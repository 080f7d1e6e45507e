"""The tiers of one worker, from the configuration and what the host has."""

import msgspec
import torch

from opal_connector.config import (
    CPUMemoryConfig,
    KeyedTierConfig,
    OpalConfig,
    parse_size_bytes,
)
from opal_connector.integrations.vllm.host_resources import (
    available_memory_bytes,
    pinned_host_rows,
)
from opal_connector.integrations.vllm.replica_set import ReplicaSet
from opal_connector.tiers import (
    BorrowedTier,
    CPUMemory,
    LaneSettings,
    LocalNVMe,
    Tier,
    allocate_host_rows,
    make_keyed_tier,
)

_MEMORY_SHARE = 0.25
_MEMORY_LIMIT_BYTES = 8 << 30


class WorkerTier(msgspec.Struct, frozen=True, eq=False):
    """One tier: its bytes, how many it may have, and the threads for it."""

    name: str
    store: Tier
    capacity_bytes: int
    lane: LaneSettings


def worker_tiers(
    config: OpalConfig,
    *,
    row_bytes: int,
    rank: int,
    local_ranks: int,
    device: torch.device,
    replicas: ReplicaSet | None = None,
) -> list[WorkerTier]:
    """The tiers of this worker, fastest first. Takes memory; touches no directory.

    The ranks of a set of replicas have one memory, and the files of the one that stores.
    """
    if replicas is not None:
        rank, local_ranks = replicas.stage, max(1, local_ranks // replicas.size)
    tiers: list[WorkerTier] = []
    for name in config.kvc_tiers:
        settings = config.keyed_tier(name)
        if settings is not None:
            tiers.append(_keyed_tier(name, settings, row_bytes, rank, local_ranks, replicas))
        elif replicas is not None:
            memory = CPUMemory(replicas.pool.rows, replicas.pool.checks)
            tiers.append(_as_tier(config.CPUMemory, memory))
        else:
            capacity_bytes = memory_bytes(config.CPUMemory, local_ranks)
            allocate = allocate_host_rows if device.type == "cpu" else pinned_host_rows
            rows = allocate(row_count=capacity_bytes // row_bytes, row_bytes=row_bytes)
            tiers.append(_as_tier(config.CPUMemory, CPUMemory(rows)))
    return tiers


def pool_bytes(config: OpalConfig, *, local_ranks: int, set_size: int) -> int:
    """The memory of all ranks of a set of replicas together; none without a tier of memory."""
    if "CPUMemory" not in config.kvc_tiers:
        return 0
    return memory_bytes(config.CPUMemory, local_ranks) * set_size


def memory_bytes(settings: CPUMemoryConfig, local_ranks: int) -> int:
    """What one worker may take, as configured or as a share of what the host has now."""
    if settings.capacity_GB is not None:
        return parse_size_bytes(settings.capacity_GB)
    share = int(available_memory_bytes() * _MEMORY_SHARE / local_ranks)
    return min(_MEMORY_LIMIT_BYTES, share)


def _as_tier(settings: CPUMemoryConfig, memory: CPUMemory) -> WorkerTier:
    return WorkerTier(
        name="CPUMemory",
        store=memory,
        capacity_bytes=memory.rows.nbytes,
        lane=LaneSettings(threads=settings.concurrency),
    )


def _keyed_tier(
    name: str,
    settings: KeyedTierConfig,
    row_bytes: int,
    rank: int,
    local_ranks: int,
    replicas: ReplicaSet | None,
) -> WorkerTier:
    pool = replicas.pool if replicas is not None else None
    store, capacity_bytes = make_keyed_tier(
        name, settings, row_bytes=row_bytes, rank=rank, local_ranks=local_ranks, slot_note=pool
    )
    if replicas is not None and not replicas.is_holder:
        note = replicas.pool if isinstance(store, LocalNVMe) else None
        store = BorrowedTier(store, note)
    return WorkerTier(
        name=name,
        store=store,
        capacity_bytes=capacity_bytes,
        lane=LaneSettings(threads=settings.concurrency, timeout_seconds=settings.timeout_seconds),
    )
