"""ARC, over keys that may be pinned."""

from collections.abc import Container
from typing import Any

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.ghosts import Ghosts
from opal_connector.eviction.line import Line
from opal_connector.eviction.queued import QueuedPolicy


class ARCPolicy(QueuedPolicy):
    """Two lines by recency, of keys used once and more than once, whose ghosts divide the room.

    As in "ARC: a self-tuning, low overhead replacement cache", Megiddo and Modha, FAST 2003: a key
    that comes back while its ghost is remembered goes to the second line, and moves the share that
    the first line is meant to have towards the line that it left. Here room is made before it is
    known what comes in, so the paper's special case for a ghost of the second line when the first
    has exactly its share does not exist.

    A pinned key whose turn it is stands aside, counts for no share any more, and leaves as soon as
    it is unpinned, unless it is used before.

    Mutable state besides the base's: `_once`, `_often`, the ghosts of both, and `_share` (how many
    keys the first line is meant to have).
    """

    def __init__(self) -> None:
        super().__init__()
        self._once = Line(self._pinned)
        self._often = Line(self._pinned)
        self._once_ghosts = Ghosts()
        self._often_ghosts = Ghosts()
        self._share = 0.0

    @override
    def check(self) -> None:
        super().check()
        assert len(self._once) + len(self._often) == len(self._home)
        for key in self._home:
            assert key not in self._once_ghosts, "a ghost is alive"
            assert key not in self._often_ghosts, "a ghost is alive"

    @override
    def _add(self, key: Key) -> None:
        once, often = len(self._once_ghosts), len(self._often_ghosts)
        if self._once_ghosts.discard(key):
            self._share = min(self._capacity, self._share + max(1.0, often / once))
            self._place(key, self._often)
        elif self._often_ghosts.discard(key):
            self._share = max(0.0, self._share - max(1.0, once / often))
            self._place(key, self._often)
        else:
            self._place(key, self._once)
        self._once_ghosts.trim(max(0, self._capacity - len(self._once)))
        self._often_ghosts.trim(max(0, self._capacity - len(self._once_ghosts)))

    @override
    def _use(self, key: Key) -> None:
        line = self._home[key]
        if line is self._often:
            line.touch(key)
        else:
            line.take(key)
            self._place(key, self._often)

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        key = self._once.pop_parked(protected)
        if key is None:
            key = self._often.pop_parked(protected)
        spared: list[Key] = []
        while key is None:
            is_long = self._once.walk_count > self._share
            line = self._once if is_long or not self._often.walk_count else self._often
            key = line.walk()
            if key in self._pinned:
                line.park(key)
                key = None
            elif key in protected:
                spared.append(key)
                key = None
        for passed in spared:
            self._home[passed].park(passed)
        return key

    @override
    def _expel(self, key: Key) -> Any:
        line: Line = super()._expel(key)
        (self._once_ghosts if line is self._once else self._often_ghosts).add(key)
        return line

    @override
    def _take_back(self, key: Key, record: Any) -> None:
        (self._once_ghosts if record is self._once else self._often_ghosts).discard(key)
        super()._take_back(key, record)
