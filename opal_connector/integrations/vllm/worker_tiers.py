"""The tiers of one worker, from the configuration and what the host has."""

import msgspec
import torch

from opal_connector.config import (
    CPUMemoryConfig,
    FileTierConfig,
    OpalConfig,
    parse_size_bytes,
)
from opal_connector.integrations.vllm.host_resources import (
    available_memory_bytes,
    pinned_host_rows,
)
from opal_connector.tiers import (
    CPUMemory,
    LaneSettings,
    Tier,
    allocate_host_rows,
    make_file_tier,
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
    config: OpalConfig, *, row_bytes: int, rank: int, local_ranks: int, device: torch.device
) -> list[WorkerTier]:
    """The tiers of this worker, fastest first. Takes memory; touches no directory."""
    return [
        _file_tier(name, settings, row_bytes, rank, local_ranks)
        if (settings := config.file_tier(name)) is not None
        else _memory_tier(config.CPUMemory, row_bytes, local_ranks, device)
        for name in config.kvc_tiers
    ]


def _memory_tier(
    settings: CPUMemoryConfig, row_bytes: int, local_ranks: int, device: torch.device
) -> WorkerTier:
    if settings.capacity_GB is not None:
        capacity_bytes = parse_size_bytes(settings.capacity_GB)
    else:
        share = int(available_memory_bytes() * _MEMORY_SHARE / local_ranks)
        capacity_bytes = min(_MEMORY_LIMIT_BYTES, share)
    row_count = capacity_bytes // row_bytes
    allocate = allocate_host_rows if device.type == "cpu" else pinned_host_rows
    return WorkerTier(
        name="CPUMemory",
        store=CPUMemory(allocate(row_count=row_count, row_bytes=row_bytes)),
        capacity_bytes=row_count * row_bytes,
        lane=LaneSettings(threads=settings.concurrency),
    )


def _file_tier(
    name: str, settings: FileTierConfig, row_bytes: int, rank: int, local_ranks: int
) -> WorkerTier:
    store, capacity_bytes = make_file_tier(
        settings, row_bytes=row_bytes, rank=rank, local_ranks=local_ranks
    )
    return WorkerTier(
        name=name,
        store=store,
        capacity_bytes=capacity_bytes,
        lane=LaneSettings(threads=settings.concurrency, timeout_seconds=settings.timeout_seconds),
    )
