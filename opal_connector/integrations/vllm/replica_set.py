"""The ranks of one engine whose KV is the same: one stores it, all load it.

With multi-head latent attention every rank of a tensor-parallel group computes the same latents.
The first of them, the holder, keeps them in memory that the others map, and in its files.
"""

import logging
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheSpec,
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from opal_connector.tiers.base import Rows
from opal_connector.tiers.shared_pool import PoolAddress, SharedPool
from opal_connector.transfers import CopyJob, DropJob, LoadJob, StoreJob

logger = logging.getLogger(__name__)

_REPLICATED_KINDS = (KVCacheSpecKind.MLA_ATTENTION, KVCacheSpecKind.SLIDING_WINDOW_MLA)


class ReplicaGroup(Protocol):
    """How ranks speak to each other while they come up. Every rank makes the same calls."""

    rank: int
    size: int

    def gather(self, said: Any) -> list[Any]:
        """What every rank of the tensor-parallel group says, by rank. Blocks until all have."""

    def gather_stages(self, said: Any) -> list[Any]:
        """What the ranks of this place say in all stages of a pipeline. Blocks until all have."""


class VllmRanks:
    """The groups of vLLM that this worker is in. Holds no state of its own."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        group = get_tp_group()
        self.rank: int = group.rank_in_group
        self.size: int = group.world_size
        self._channel = group.cpu_group
        self._stages = get_pp_group()

    def gather(self, said: Any) -> list[Any]:
        """What every rank of the tensor-parallel group says, by rank. Blocks until all have."""
        return _gathered(said, self.size, self._channel)

    def gather_stages(self, said: Any) -> list[Any]:
        """What the ranks of this place say in all stages of a pipeline. Blocks until all have."""
        return _gathered(said, self._stages.world_size, self._stages.cpu_group)


def _gathered(said: Any, size: int, channel: Any) -> list[Any]:
    heard: list[Any] = [None] * size
    torch.distributed.all_gather_object(heard, said, group=channel)
    return heard


class DevicePins(Protocol):
    """Makes rows fast for a device, and undoes it. There may be no row."""

    def pin(self, rows: Rows) -> bool:
        """Register rows; whether that went well."""

    def unpin(self, rows: Rows) -> None:
        """Give back what was registered."""


class ReplicaSet(msgspec.Struct, frozen=True, eq=False):
    """One rank's part in its set.

    Attributes:
        stage: Of the pipeline. All of them know what is stored under this number.
        size: How many ranks there are.
        is_holder: Whether this one stores.
        pool: The holder's memory.
    """

    stage: int
    size: int
    is_holder: bool
    pool: SharedPool


class _Offer(msgspec.Struct, frozen=True):
    host: str
    row_bytes: int


def is_replicated(kv_cache_config: KVCacheConfig) -> bool:
    """Whether all ranks of a tensor-parallel group have the same bytes in every block.

    A stage of a pipeline may have no layer of a group, and knows its kind all the same.
    """
    numbers = kv_cache_config.prefix_cacheable_group_ids
    return bool(numbers) and all(
        get_kv_cache_spec_kind(spec) in _REPLICATED_KINDS
        for number in numbers
        for spec in _specs(kv_cache_config.kv_cache_groups[number].kv_cache_spec)
    )


def _specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]


def join_replica_set(
    group: ReplicaGroup,
    *,
    stage: int,
    row_bytes: int,
    pool_bytes: int,
    pins: DevicePins | None = None,
) -> ReplicaSet | None:
    """Agree on a holder and map its memory; None where every rank has to store by itself.

    That is so if ranks are on several hosts, if one of them cannot or must not share (it says 0
    `row_bytes`), if memory cannot be shared, or if that is so in another stage of the pipeline. All
    ranks come to the same end. Blocks until all have come.
    """
    pool = _agree(group, row_bytes, pool_bytes, pins)
    if all(group.gather_stages(pool is not None)) and pool is not None:
        return ReplicaSet(stage, group.size, group.rank == 0, pool)
    if pool is not None and pins is not None:
        pins.unpin(pool.rows)
    return None


def _agree(
    group: ReplicaGroup, row_bytes: int, pool_bytes: int, pins: DevicePins | None
) -> SharedPool | None:
    """The memory of one stage, if each of its ranks has it."""
    offers = group.gather(_Offer(_host_id(), row_bytes))
    if any(offer.row_bytes == 0 for offer in offers):
        return None
    if any(offer != offers[0] for offer in offers):
        _warn("the ranks are on several hosts, or their blocks differ in size")
        return None
    is_holder = group.rank == 0
    pool = _created(pool_bytes // row_bytes, row_bytes) if is_holder else None
    address = group.gather(pool.address if pool is not None else None)[0]
    if address is None:
        return None
    if pool is None:
        pool = _mapped(address)
    if pool is not None and pins is not None and not _is_pinned(pool, pins):
        pool = None
    if all(group.gather(pool is not None)):
        return pool
    if pool is not None and pins is not None:
        pins.unpin(pool.rows)
    return None


def borrowed_job(
    job: LoadJob | StoreJob | CopyJob | DropJob,
) -> LoadJob | StoreJob | CopyJob | DropJob:
    """What is left of a job for a rank that stores nothing: the loads, with no copy to keep.

    A rest without objects is answered at once. The copies that a load keeps are to be answered by
    the caller, for this rank has no part in them.
    """
    match job:
        case StoreJob() | CopyJob():
            return msgspec.structs.replace(job, objects=())
        case DropJob():
            return msgspec.structs.replace(job, names=(), is_wipe=False)
        case LoadJob():
            objects = tuple(
                msgspec.structs.replace(item, kept_tier=-1, kept_rows=()) for item in job.objects
            )
            return msgspec.structs.replace(job, objects=objects, kept_job_id=0)


def _host_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # and what cannot be mapped is found out later


def _created(row_count: int, row_bytes: int) -> SharedPool | None:
    try:
        return SharedPool.create(row_count=row_count, row_bytes=row_bytes)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        _warn(error)
        return None


def _mapped(address: PoolAddress) -> SharedPool | None:
    try:
        return SharedPool.map(address)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        _warn(error)
        return None


def _is_pinned(pool: SharedPool, pins: DevicePins) -> bool:
    try:
        is_pinned = pins.pin(pool.rows)
    except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
        _warn(error)
        return False
    if not is_pinned:
        _warn("the device takes no memory that is shared")
    return is_pinned


def _warn(reason: object) -> None:
    logger.warning("every rank stores a copy of its own: %s", reason)
