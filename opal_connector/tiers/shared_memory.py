"""Host memory that another process of this machine can map, if it is given the file."""

import mmap
import os
import weakref
from typing import NamedTuple, Self

import numpy as np
from typing_extensions import Buffer

from opal_connector.tiers.base import Rows


class SharedMemory(mmap.mmap):
    """Zeroed memory with a file that has no name: it goes when nobody maps it any more."""

    file: int  # for others to map; closed with the mapping

    def __new__(cls, size_bytes: int) -> Self:
        """As many bytes, which the system gives when they are first written."""
        file = os.memfd_create("opal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size_bytes)
            memory = super().__new__(cls, file, size_bytes)
        except BaseException:
            os.close(file)
            raise
        memory.file = file
        weakref.finalize(memory, os.close, file).atexit = False  # ends with the process
        return memory


class Placed(NamedTuple):
    """Shared memory, and where it begins in this process."""

    memory: SharedMemory
    address: int
    size_bytes: int


def host_memory(size_bytes: int) -> mmap.mmap:
    """Zeroed memory that can be shared, where the system knows how; else any."""
    if hasattr(os, "memfd_create"):
        return SharedMemory(size_bytes)
    return mmap.mmap(-1, size_bytes)


def shared_memory_of(rows: Rows) -> SharedMemory | None:
    """What rows of `allocate_host_rows` lie in; None for memory from elsewhere."""
    owner: object = rows
    while owner is not None and not isinstance(owner, SharedMemory):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def placed_of(memory: SharedMemory) -> Placed:
    """Where some memory begins in this process, and its size."""
    return Placed(memory, address_of(memory), len(memory))


def address_of(buffer: Buffer) -> int:
    """Where a buffer that is not empty begins in this process."""
    start: int = np.frombuffer(memoryview(buffer), dtype=np.uint8).__array_interface__["data"][0]
    return start
