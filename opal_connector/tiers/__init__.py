"""Bytes at rest, and the threads that move them. Never decides what to keep."""

from opal_connector.tiers.base import ChecksumMismatchError, PagedBlocks, TierStore
from opal_connector.tiers.cpu_memory import CPUMemory, OpalMemoryObj, allocate_host_rows
from opal_connector.tiers.execute import execute_job
from opal_connector.tiers.mover import Mover
from opal_connector.tiers.rows import ArrayBlocks

__all__ = [
    "ArrayBlocks",
    "CPUMemory",
    "ChecksumMismatchError",
    "Mover",
    "OpalMemoryObj",
    "PagedBlocks",
    "TierStore",
    "allocate_host_rows",
    "execute_job",
]
