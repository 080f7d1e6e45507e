"""S3-FIFO, over keys that may be pinned."""

from collections.abc import Container
from typing import Any

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.ghosts import Ghosts
from opal_connector.eviction.handover import Candidate, Handover
from opal_connector.eviction.line import Line
from opal_connector.eviction.queued import QueuedPolicy

SMALL_PART = 0.1
MOST_USES = 3  # two bits


class S3FIFOPolicy(QueuedPolicy, Candidate):
    """Three queues: a small one for what is new, a main one, and ghosts of what left the small one.

    As in "FIFO queues are all you need for cache eviction", Yang, Zhang, Qiu, Yue and Rashmi, SOSP
    2023. A key whose ghost is remembered goes to the main queue, any other to the small one, which
    is a tenth. From the small queue a key that was used more than once goes on to the main one,
    any other leaves; in the main queue a used key goes round once more for every use, up to three.
    A pinned key is treated like any other until it should leave: then it stands aside, counts for
    no queue any more, and leaves as soon as it is unpinned, unless it is used before. So the head
    of a chain ages while its tail is there, and every step is paid for by a use or an insertion.

    Mutable state besides the base's: `_small`, `_main`, `_ghosts` (at most as many as the main
    queue is meant to hold) and `_uses` (key -> uses that still count).
    """

    def __init__(self) -> None:
        super().__init__()
        self._small = Line(self._pinned)
        self._main = Line(self._pinned)
        self._ghosts = Ghosts()
        self._uses: dict[Key, int] = {}

    @override
    def hand_over(self) -> Handover:
        return Handover(
            self._small, self._main, self._pinned, self._ghosts, self._capacity, SMALL_PART
        )

    @override
    def take_over(self, order: Handover) -> None:
        self._small, self._main = self._begin_with(order)
        self._ghosts = order.ghosts
        self._uses = dict.fromkeys(self._home, 0)

    @override
    def check(self) -> None:
        super().check()
        assert self._uses.keys() == self._home.keys()
        assert len(self._small) + len(self._main) == len(self._home)
        assert not any(key in self._ghosts for key in self._home), "a ghost is alive"

    @override
    def _add(self, key: Key) -> None:
        line = self._small
        if key in self._ghosts:
            del self._ghosts[key]
            line = self._main
        self._home[key] = line
        line.order[key] = None
        self._uses[key] = 0
        if len(self._ghosts) > self._capacity * (1 - SMALL_PART):
            self._ghosts.trim(int(self._capacity * (1 - SMALL_PART)))

    @override
    def _use(self, key: Key) -> None:
        uses = self._uses[key]
        if uses < MOST_USES:
            self._uses[key] = uses + 1
        line = self._home[key]
        if key in line.parked:
            del line.parked[key]
            line.order[key] = None

    @override
    def _drop(self, key: Key) -> None:
        super()._drop(key)
        del self._uses[key]

    @override
    def _choose(self, protected: Container[Key]) -> Key:
        small, main = self._small, self._main
        key = small.pop_parked(protected) if small.free else None
        if key is None and main.free:
            key = main.pop_parked(protected)
        spared: list[Key] = []
        while key is None:
            if len(small.order) >= self._capacity * SMALL_PART or not main.order:
                key = self._walk_small()
            else:
                key = self._walk_main()
            if key is not None and key in protected:
                spared.append(key)
                key = None
        for passed in spared:
            self._home[passed].park(passed)
        return key

    @override
    def _expel(self, key: Key) -> Any:
        line = self._home.pop(key)
        if line is self._small:
            self._ghosts.add(key)
        return line, self._uses.pop(key)

    @override
    def _take_back(self, key: Key, record: Any) -> None:
        line, self._uses[key] = record
        self._ghosts.discard(key)
        super()._take_back(key, line)

    def _walk_small(self) -> Key | None:
        key = self._small.order.popitem(last=False)[0]
        if self._uses[key] > 1:
            self._uses[key] = 0
            self._home[key] = self._main
            self._main.order[key] = None
        elif key in self._pinned:
            self._small.park(key)
        else:
            return key
        return None

    def _walk_main(self) -> Key | None:
        order = self._main.order
        while order:
            key = order.popitem(last=False)[0]
            if self._uses[key]:
                self._uses[key] -= 1
                order[key] = None
            elif key in self._pinned:
                self._main.park(key)
            else:
                return key
        return None
