"""Which of this process's memory a process with Mooncake's library maps, as long as it lives."""

import threading
import weakref
from bisect import bisect_right
from collections import deque
from typing import NamedTuple

from opal_connector.mooncake_helper.messages import Piece
from opal_connector.tiers.shared_memory import Placed, SharedMemory


class _Mapped(NamedTuple):
    start: int
    end: int
    number: int
    memory: "weakref.ref[SharedMemory]"


class MappedMemory:
    """Ranges of addresses, and the numbers under which the other process maps them.

    It keeps no memory alive. What has gone is found no more from that moment on, whatever lies at
    its addresses by then, and `take_dead` tells its number.

    Mutable state: `_entries`, replaced and never changed, guarded by `_lock`; `_dead`, which grows
    wherever the last user of some memory lets go, without a lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Mapped] = []
        self._dead: deque[int] = deque()

    def add(self, placed: Placed, number: int) -> None:
        """The other process maps this memory under this number."""
        dead = self._dead
        memory = weakref.ref(placed.memory, lambda _: dead.append(number))
        entry = _Mapped(placed.address, placed.address + placed.size_bytes, number, memory)
        with self._lock:
            living = [known for known in self._entries if known.memory() is not None]
            self._entries = sorted([*living, entry], key=lambda known: known.start)

    def piece_at(self, address: int, size_bytes: int) -> Piece | None:
        """The piece that a range of this process's memory is; None if it is not mapped."""
        entries = self._entries
        at = bisect_right(entries, address, key=lambda entry: entry.start) - 1
        if at < 0:
            return None
        found = entries[at]
        if address + size_bytes > found.end or found.memory() is None:
            return None
        return Piece(found.number, address - found.start, size_bytes)

    @property
    def has_dead(self) -> bool:
        """Whether memory has gone that the other process maps still."""
        return bool(self._dead)

    def take_dead(self) -> list[int]:
        """The numbers of memory that has gone since the last call."""
        dead = [self._dead.popleft() for _ in range(len(self._dead))]
        with self._lock:
            self._entries = [known for known in self._entries if known.memory() is not None]
        return dead
