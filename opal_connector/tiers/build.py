"""Tiers of named objects from their settings."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from opal_connector.config import (
    DistributedFSConfig,
    EngineTierConfig,
    FileTierConfig,
    KeyedTierConfig,
    LocalNVMeConfig,
    SharedTierConfig,
    parse_size_bytes,
)
from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.engines import (
    UNLIMITED_BYTES,
    EngineMedium,
    EngineTier,
    engine_identity,
    make_engine_client,
)
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.local_nvme import LocalNVMe, SlotNote
from opal_connector.tiers.shared_directory import SharedDirectory
from opal_connector.tiers.shared_medium import SharedMedium

logger = logging.getLogger(__name__)

_DISK_SHARE = 0.5


def make_keyed_tier(
    name: str,
    settings: KeyedTierConfig,
    *,
    row_bytes: int,
    rank: int,
    local_ranks: int = 1,
    slot_note: SlotNote | None = None,
) -> tuple[KeyedTier, int]:
    """A tier of named objects and the bytes that this rank's books may give it.

    `local_ranks` share a local disk; a shared tier is accounted for as a whole. `slot_note` is
    where the directory on a local disk is noted for processes that only read there. Touches no
    directory and connects to nothing.

    Raises:
        ConfigError: A library that the tier needs is not installed.
    """
    if isinstance(settings, EngineTierConfig):
        client = make_engine_client(name, settings, gives_memory=True)
        return EngineTier(name, client, row_bytes=row_bytes, rank=rank), UNLIMITED_BYTES
    if isinstance(settings, DistributedFSConfig):
        return _make_distributed_fs(settings, row_bytes=row_bytes, rank=rank)
    assert isinstance(settings, LocalNVMeConfig)
    store, capacity_bytes = _make_local_nvme(
        settings, row_bytes=row_bytes, rank=rank, local_ranks=local_ranks, slot_note=slot_note
    )
    return store, capacity_bytes // local_ranks


def make_shared_medium(
    name: str,
    settings: SharedTierConfig,
    *,
    namespace: bytes,
    ranks: int,
    limit_bytes: int,
    knows: Callable[[bytes], bool],
    known_keys: Callable[[], Sequence[bytes]],
) -> SharedMedium:
    """What the scheduler's process sees of a shared tier. Connects to nothing.

    `knows` and `known_keys` tell what the books believe to be there; any thread may call them.
    """
    if isinstance(settings, EngineTierConfig):
        return EngineMedium(
            make_engine_client(name, settings),
            identity=engine_identity(settings),
            namespace=namespace,
            ranks=ranks,
            knows=knows,
            known_keys=known_keys,
        )
    assert settings.path is not None  # checked with the configuration
    root = Path(settings.path).expanduser()
    return SharedDirectory(root, namespace=namespace, ranks=ranks, limit_bytes=limit_bytes)


def _make_distributed_fs(
    settings: DistributedFSConfig, *, row_bytes: int, rank: int
) -> tuple[DistributedFS, int]:
    root, capacity_bytes = _root_and_capacity(settings)
    return DistributedFS(root, row_bytes=row_bytes, rank=rank, fsync=settings.fsync), capacity_bytes


def _make_local_nvme(
    settings: LocalNVMeConfig,
    *,
    row_bytes: int,
    rank: int,
    local_ranks: int,
    slot_note: SlotNote | None,
) -> tuple[LocalNVMe, int]:
    root, capacity_bytes = _root_and_capacity(settings)
    if settings.capacity_GB is None and settings.reserve_GB:
        spare_bytes = free_bytes(root) - parse_size_bytes(settings.reserve_GB)
        capacity_bytes = max(0, min(capacity_bytes, spare_bytes))
    store = LocalNVMe(
        root,
        row_bytes=row_bytes,
        rank=rank,
        fsync=settings.fsync,
        limit_bytes=capacity_bytes,
        local_ranks=local_ranks,
        slot_note=slot_note,
    )
    return store, capacity_bytes


def _root_and_capacity(settings: FileTierConfig) -> tuple[Path, int]:
    assert settings.path is not None  # checked with the configuration
    root = Path(settings.path).expanduser()
    if settings.capacity_GB is not None:
        return root, parse_size_bytes(settings.capacity_GB)
    return root, int(free_bytes(root) * _DISK_SHARE)


def free_bytes(path: Path) -> int:
    """Free bytes of the filesystem that `path` is, or will be, on. Blocks.

    0 if it cannot be asked: the tier then holds nothing, and opening it says why.
    """
    for existing in (path, *path.parents):
        try:
            status = os.statvfs(existing)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("cannot tell what is free at %s: %r", existing, error)
            return 0
        return status.f_bavail * status.f_frsize
    return 0
