"""ARC, over keys that may be pinned."""

from collections.abc import Container
from typing import Any

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.ghosts import Ghosts
from opal_connector.eviction.handover import Candidate, Handover
from opal_connector.eviction.line import Line
from opal_connector.eviction.queued import QueuedPolicy


class ARCPolicy(QueuedPolicy, Candidate):
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
    def hand_over(self) -> Handover:
        share = self._share / self._capacity if self._capacity else 0.0
        return Handover(
            self._once, self._often, self._pinned, self._once_ghosts, self._capacity, share
        )

    @override
    def take_over(self, order: Handover) -> None:
        self._once, self._often = self._begin_with(order)
        self._once_ghosts = order.ghosts
        self._share = order.share * order.capacity

    @override
    def check(self) -> None:
        super().check()
        assert len(self._once) + len(self._often) == len(self._home)
        for key in self._home:
            assert key not in self._once_ghosts, "a ghost is alive"
            assert key not in self._often_ghosts, "a ghost is alive"

    @override
    def _add(self, key: Key) -> None:
        once, often = self._once_ghosts, self._often_ghosts
        line = self._once
        if key in once:
            self._share = min(self._capacity, self._share + max(1.0, len(often) / len(once)))
            del once[key]
            line = self._often
        elif key in often:
            self._share = max(0.0, self._share - max(1.0, len(once) / len(often)))
            del often[key]
            line = self._often
        self._home[key] = line
        line.order[key] = None
        room = self._capacity - len(self._once.order) - len(self._once.parked)
        if len(once) > room:
            once.trim(max(0, room))
        if len(often) > self._capacity - len(once):
            often.trim(max(0, self._capacity - len(once)))

    @override
    def _use(self, key: Key) -> None:
        line, often = self._home[key], self._often
        if line is not often:
            line.take(key)
            self._home[key] = often
        elif key in often.order:
            often.order.move_to_end(key)
            return
        else:
            del often.parked[key]
        often.order[key] = None

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        once, often, pinned = self._once, self._often, self._pinned
        key = once.pop_parked(protected) if once.free else None
        if key is None and often.free:
            key = often.pop_parked(protected)
        if key is not None:
            return key
        spared: list[Key] = []
        while True:
            line = once if len(once.order) > self._share or not often.order else often
            key = line.order.popitem(last=False)[0]
            if key in pinned:
                line.park(key)
            elif key in protected:
                spared.append(key)
            else:
                break
        for passed in spared:
            self._home[passed].park(passed)
        return key

    @override
    def _expel(self, key: Key) -> Any:
        line = self._home.pop(key)
        (self._once_ghosts if line is self._once else self._often_ghosts)[key] = None
        return line

    @override
    def _take_back(self, key: Key, record: Any) -> None:
        (self._once_ghosts if record is self._once else self._often_ghosts).discard(key)
        super()._take_back(key, record)
