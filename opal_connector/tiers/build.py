"""Tiers of files from their settings."""

import logging
import os
from pathlib import Path

from opal_connector.config import (
    DistributedFSConfig,
    FileTierConfig,
    LocalNVMeConfig,
    parse_size_bytes,
)
from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.local_nvme import LocalNVMe

logger = logging.getLogger(__name__)

_DISK_SHARE = 0.5


def make_file_tier(
    settings: FileTierConfig, *, row_bytes: int, rank: int, local_ranks: int = 1
) -> tuple[FileTier, int]:
    """A tier of files and the bytes that this rank's books may give it. Touches no directory.

    `local_ranks` share a local disk; a shared directory is accounted for as a whole.
    """
    assert settings.path is not None  # checked with the configuration
    root = Path(settings.path).expanduser()
    if settings.capacity_GB is not None:
        capacity_bytes = parse_size_bytes(settings.capacity_GB)
    else:
        capacity_bytes = int(free_bytes(root) * _DISK_SHARE)
    if isinstance(settings, DistributedFSConfig):
        return DistributedFS(
            root, row_bytes=row_bytes, rank=rank, fsync=settings.fsync
        ), capacity_bytes
    assert isinstance(settings, LocalNVMeConfig)
    if settings.capacity_GB is None and settings.reserve_GB:
        spare_bytes = free_bytes(root) - parse_size_bytes(settings.reserve_GB)
        capacity_bytes = max(0, min(capacity_bytes, spare_bytes))
    store = LocalNVMe(
        root,
        row_bytes=row_bytes,
        rank=rank,
        fsync=settings.fsync,
        limit_bytes=capacity_bytes,
    )
    return store, capacity_bytes // local_ranks


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
