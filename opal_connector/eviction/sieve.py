"""SIEVE, over keys that may be pinned."""

import heapq
from collections.abc import Container

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.undoable import UndoablePolicy

_SLACK = 16  # out-of-date heap entries that are not worth a rebuild
_Heap = list[tuple[int, Key]]


class SievePolicy(UndoablePolicy):
    """A hand walks from the oldest insertion to the newest; what was used meanwhile stays in place.

    As in "SIEVE is simpler than LRU: an efficient turn-key eviction algorithm for web caches",
    Zhang, Yang, Yue, Vigfusson and Rashmi, NSDI 2024. The hand clears the mark of a key that was
    used and evicts the first one that was not. It walks over pinned keys without a look: they keep
    place and mark.

    Mutable state besides the base's: `_places` (key -> number of its insertion), `_used` (the
    marks), `_ahead` and `_behind` (heaps of the keys that the hand will meet in this round and in
    the next), `_queued` (keys with an entry in one of them), `_hand` (the place it has
    reached), and the next number at either end (what is restored comes before all others).
    """

    def __init__(self) -> None:
        self._places: dict[Key, int] = {}
        super().__init__(self._places)
        self._used: set[Key] = set()
        self._ahead: _Heap = []
        self._behind: _Heap = []
        self._queued: set[Key] = set()
        self._hand = 0
        self._next_place = 1
        self._front_place = 0

    @override
    def check(self) -> None:
        super().check()
        assert self._used <= self._places.keys(), "a mark of nothing"
        live = [(place, key) for place, key in self._ahead if self._places.get(key) == place]
        live += [(place, key) for place, key in self._behind if self._places.get(key) == place]
        assert len(live) == len(set(live)), "a key is met twice in a round"
        assert {key for _, key in live} == self._queued
        assert self._places.keys() - self._pinned <= self._queued, "a key would never be met"

    @override
    def _add(self, key: Key) -> None:
        self._places[key] = self._next_place
        self._next_place += 1
        self._free(key)

    @override
    def _use(self, key: Key) -> None:
        if key not in self._places:
            raise KeyError(key)
        self._used.add(key)

    @override
    def _drop(self, key: Key) -> None:
        self._withdraw(key)
        self._used.discard(key)
        del self._places[key]

    @override
    def _free(self, key: Key) -> None:
        if key not in self._queued:
            is_ahead = self._places[key] > self._hand
            self._push(self._ahead if is_ahead else self._behind, key)

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        spared: list[Key] = []
        while True:
            if not self._ahead:
                self._ahead, self._behind, self._hand = self._behind, [], 0
            place, key = heapq.heappop(self._ahead)
            if self._places.get(key) != place:
                continue
            self._hand = max(self._hand, place)
            self._queued.discard(key)
            if key in self._pinned:
                continue
            if key in protected:
                spared.append(key)
            elif key in self._used:
                self._used.discard(key)
                self._push(self._behind, key)
            else:
                break
        for passed in spared:
            self._push(self._behind, passed)
        return key

    @override
    def _withdraw(self, key: Key) -> None:
        self._queued.discard(key)

    @override
    def _expel(self, key: Key) -> None:
        self._used.discard(key)  # unless it was chosen
        del self._places[key]

    @override
    def _take_back(self, key: Key, record: None) -> None:
        self._front_place -= 1
        self._places[key] = self._front_place
        self._queued.add(key)
        heapq.heappush(self._ahead, (self._front_place, key))

    def _push(self, heap: _Heap, key: Key) -> None:
        self._queued.add(key)
        heapq.heappush(heap, (self._places[key], key))
        if len(self._ahead) + len(self._behind) > 2 * len(self._queued) + _SLACK:
            self._ahead = self._live(self._ahead)
            self._behind = self._live(self._behind)

    def _live(self, heap: _Heap) -> _Heap:
        kept = [entry for entry in heap if self._places.get(entry[1]) == entry[0]]
        heapq.heapify(kept)
        return kept
