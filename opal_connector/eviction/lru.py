"""Least recently used, over keys that may be pinned for long.

The order is a counter per key; a heap finds the smallest. Heap entries are lazy: an entry whose
key was touched since is pushed back with its new counter when it surfaces, an entry whose key is
pinned or gone is dropped. So a touch costs one dictionary write, however many keys are pinned, and
a key keeps its place while it is pinned.
"""

import heapq
from collections.abc import Container

from typing_extensions import override

from opal_connector.eviction.base import EvictionPolicy, Key


class LRUPolicy(EvictionPolicy):
    """Evicts the key whose last access is oldest.

    Mutable state: `_last_use` (key to counter), `_pinned`, and the heap of (counter, key) with
    `_queued`, the unpinned and some stale keys that have exactly one heap entry.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._last_use: dict[Key, int] = {}
        self._pinned: set[Key] = set()
        self._heap: list[tuple[int, Key]] = []
        self._queued: set[Key] = set()

    @override
    def insert(self, key: Key) -> None:
        if key in self._last_use:
            raise KeyError(key)
        self._last_use[key] = self._tick()
        self._queue(key)

    @override
    def touch(self, key: Key) -> None:
        if key not in self._last_use:
            raise KeyError(key)
        self._last_use[key] = self._tick()

    @override
    def remove(self, key: Key) -> None:
        del self._last_use[key]
        self._pinned.discard(key)
        if len(self._heap) > 2 * len(self._last_use) + 64:
            self._rebuild()

    @override
    def pin(self, key: Key) -> None:
        if key not in self._last_use:
            raise KeyError(key)
        self._pinned.add(key)

    @override
    def unpin(self, key: Key) -> None:
        if key not in self._last_use:
            raise KeyError(key)
        self._pinned.discard(key)
        self._queue(key)

    @override
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        victims: list[Key] = []
        spared: list[Key] = []
        while len(victims) < count:
            key = self._pop_oldest()
            if key is None:
                break
            (spared if key in protected else victims).append(key)
        for key in spared:
            self._queue(key)
        if len(victims) < count:
            for key in victims:
                self._queue(key)
            return None
        for key in victims:
            del self._last_use[key]
        return victims

    @override
    def __len__(self) -> int:
        return len(self._last_use)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._last_use

    @override
    def check(self) -> None:
        assert self._pinned <= self._last_use.keys()
        assert {key for _, key in self._heap} == self._queued
        assert len(self._heap) == len(self._queued)
        assert self._last_use.keys() - self._pinned <= self._queued
        assert all(
            counter <= self._last_use[key] for counter, key in self._heap if key in self._last_use
        )

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _queue(self, key: Key) -> None:
        if key not in self._queued:
            self._queued.add(key)
            heapq.heappush(self._heap, (self._last_use[key], key))

    def _pop_oldest(self) -> Key | None:
        """The unpinned key used longest ago, off the heap but still held; None if there is none."""
        while self._heap:
            counter, key = self._heap[0]
            current = self._last_use.get(key)
            if current is None or key in self._pinned:
                heapq.heappop(self._heap)
                self._queued.discard(key)
            elif counter < current:
                heapq.heapreplace(self._heap, (current, key))
            else:
                heapq.heappop(self._heap)
                self._queued.discard(key)
                return key
        return None

    def _rebuild(self) -> None:
        self._heap = [
            (counter, key) for key, counter in self._last_use.items() if key not in self._pinned
        ]
        heapq.heapify(self._heap)
        self._queued = {key for _, key in self._heap}
