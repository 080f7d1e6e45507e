"""Bytes at rest, and the threads that move them. Never decides what to keep."""

from opal_connector.tiers.base import ChecksumMismatchError, PagedBlocks, TierStore
from opal_connector.tiers.borrowed_tier import BorrowedTier
from opal_connector.tiers.build import make_keyed_tier, make_shared_medium
from opal_connector.tiers.cpu_memory import CPUMemory, OpalMemoryObj, allocate_host_rows
from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.execute import Job, execute_job
from opal_connector.tiers.file_moves import Tier
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.inline import InlineMover
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.tiers.mover import LaneSettings, Mover
from opal_connector.tiers.record import file_bytes
from opal_connector.tiers.rows import ArrayBlocks
from opal_connector.tiers.shared_directory import SharedDirectory
from opal_connector.tiers.shared_keeper import Need, SharedKeeper
from opal_connector.tiers.shared_medium import SharedMedium

__all__ = [
    "ArrayBlocks",
    "BorrowedTier",
    "CPUMemory",
    "ChecksumMismatchError",
    "DistributedFS",
    "FileTier",
    "InlineMover",
    "Job",
    "KeyedTier",
    "LaneSettings",
    "LocalNVMe",
    "Mover",
    "Need",
    "OpalMemoryObj",
    "PagedBlocks",
    "SharedDirectory",
    "SharedKeeper",
    "SharedMedium",
    "Tier",
    "TierStore",
    "allocate_host_rows",
    "execute_job",
    "file_bytes",
    "make_keyed_tier",
    "make_shared_medium",
]
