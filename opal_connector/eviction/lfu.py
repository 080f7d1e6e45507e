"""Least frequently used, over keys that may be pinned."""

import heapq
from collections.abc import Container

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.line import Line
from opal_connector.eviction.undoable import UndoablePolicy

_SLACK = 16  # counts without keys that are not worth a rebuild


class LFUPolicy(UndoablePolicy):
    """Evicts the key with the fewest accesses since it came in; among equals the oldest access.

    Counts are never aged and are forgotten with the key ("in-cache" LFU), as Ketan Shah, Anirban
    Mitra and Dhruv Matani describe it in "An O(1) algorithm for implementing the LFU cache eviction
    scheme" (2010): one list of keys per count.

    Mutable state besides the base's: `_uses` (key -> count), `_lines` (count -> its keys),
    `_counts` (a heap of the counts in `_queued`; some may have lost their line).
    """

    def __init__(self) -> None:
        self._uses: dict[Key, int] = {}
        super().__init__(self._uses)
        self._lines: dict[int, Line] = {}
        self._counts: list[int] = []
        self._queued: set[int] = set()

    @override
    def check(self) -> None:
        super().check()
        assert set(self._counts) == self._queued >= self._lines.keys(), "a count would not be found"
        assert len(self._counts) == len(self._queued)
        places = {key: count for count, line in self._lines.items() for key in line}
        assert places == self._uses, "a key stands among others of another count"
        for line in self._lines.values():
            assert line, "an empty line stays"
            line.check()

    @override
    def _add(self, key: Key) -> None:
        self._uses[key] = 1
        self._line(1).insert(key)

    @override
    def _use(self, key: Key) -> None:
        count = self._uses[key]
        self._withdraw(key)
        self._uses[key] = count + 1
        self._line(count + 1).insert(key)

    @override
    def _drop(self, key: Key) -> None:
        self._withdraw(key)
        del self._uses[key]

    @override
    def _free(self, key: Key) -> None:
        self._lines[self._uses[key]].unpark(key)

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        passed: list[int] = []
        key = None
        while key is None:
            count = self._counts[0]
            line = self._lines.get(count)
            key = None if line is None else line.pop(protected)
            if key is None:
                heapq.heappop(self._counts)
                if line is None:
                    self._queued.discard(count)
                else:
                    passed.append(count)  # everything in it is in use
            elif not line:
                del self._lines[count]
        for count in passed:
            heapq.heappush(self._counts, count)
        return key

    @override
    def _withdraw(self, key: Key) -> None:
        count = self._uses[key]
        line = self._lines[count]
        line.take(key)
        if not line:
            del self._lines[count]

    @override
    def _expel(self, key: Key) -> int:
        return self._uses.pop(key)

    @override
    def _take_back(self, key: Key, record: int) -> None:
        self._uses[key] = record
        self._line(record).restore([key])

    def _line(self, count: int) -> Line:
        line = self._lines.get(count)
        if line is None:
            line = self._lines[count] = Line(self._pinned)
            if count not in self._queued:
                self._queued.add(count)
                heapq.heappush(self._counts, count)
            if len(self._counts) > 2 * len(self._lines) + _SLACK:
                self._counts = sorted(self._lines)
                self._queued = set(self._counts)
        return line
