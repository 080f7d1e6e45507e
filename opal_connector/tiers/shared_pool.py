"""`SharedPool`: rows of host memory that one process allocates and others of its host read."""

import mmap
import os
import secrets
from typing import Final, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from opal_connector.tiers.base import Rows
from opal_connector.tiers.cpu_memory import allocate_host_rows
from opal_connector.tiers.shared_memory import shared_memory_of

_TOKEN: Final = 0  # words of the notes: whose they are,
_SLOT: Final = 1  # the directory that the allocating process has, and one,
_NOTES: Final = 2  # and then the check values


class PoolAddress(msgspec.Struct, frozen=True):
    """Where a pool is: files of a process of this host, and what is in them."""

    process: int
    rows_file: int
    notes_file: int
    row_count: int
    row_bytes: int
    token: int


class SharedPool:
    """Rows, their check values, and a note of the directory that goes with them.

    Mutable state: the memory. Only the process that made it writes there, and tells the others
    through the books when something may be read.
    """

    def __init__(self, rows: Rows, notes: NDArray[np.uint64], address: PoolAddress) -> None:
        self.rows = rows
        self.checks = notes[_NOTES:]
        self.address = address
        self._notes = notes

    @classmethod
    def create(cls, *, row_count: int, row_bytes: int) -> Self:
        """Zeroed rows of this process, of which the system gives pages when they are written.

        Raises:
            OSError: The system has no memory that can be shared.
        """
        rows = allocate_host_rows(row_count=row_count, row_bytes=row_bytes)
        notes = allocate_host_rows(row_count=_NOTES + row_count, row_bytes=8)
        rows_memory, notes_memory = shared_memory_of(rows), shared_memory_of(notes)
        if rows_memory is None or notes_memory is None:
            raise OSError("this system has no memory that processes can share")
        words = notes.reshape(-1).view(np.uint64)
        token = secrets.randbits(63)
        words[_TOKEN] = token
        address = PoolAddress(
            os.getpid(), rows_memory.file, notes_memory.file, row_count, row_bytes, token
        )
        return cls(rows, words, address)

    @classmethod
    def map(cls, address: PoolAddress) -> Self:
        """The pool of another process.

        Raises:
            OSError: It cannot be reached from here, or there is something else.
        """
        notes = _mapped(address.process, address.notes_file, 8 * (_NOTES + address.row_count))
        words = notes.view(np.uint64)
        if int(words[_TOKEN]) != address.token:
            raise OSError(f"process {address.process} is another one than was meant")
        size_bytes = address.row_count * address.row_bytes
        rows = _mapped(address.process, address.rows_file, max(1, size_bytes))[:size_bytes]
        return cls(rows.reshape(address.row_count, address.row_bytes), words, address)

    @property
    def slot(self) -> int:
        """The number of the directory that the allocating process has; -1 before it has one."""
        return int(self._notes[_SLOT]) - 1

    @slot.setter
    def slot(self, number: int) -> None:
        self._notes[_SLOT] = number + 1


def _mapped(process: int, file: int, size_bytes: int) -> NDArray[np.uint8]:
    path = f"/proc/{process}/fd/{file}"
    # It may be anything, until its size and what is in it say otherwise.
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        if os.fstat(opened).st_size != size_bytes:
            raise OSError(f"{path} has another size than {size_bytes} bytes")
        memory = mmap.mmap(opened, size_bytes)
    finally:
        os.close(opened)
    return np.frombuffer(memory, dtype=np.uint8)
