"""An order over keys of which most are pinned for long."""

import heapq
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence

from opal_connector.eviction.base import Key

_SLACK = 16  # out-of-date heap entries that are not worth a rebuild


class Line:
    """Keys by place, the oldest first; what is pinned keeps its place and is not looked at.

    A search from the old end meets a pinned key once and parks it: from then on it stands aside
    with a rank, and only its unpinning brings it back into the search, at that rank. Whatever is
    parked is older than whatever is not, because keys are parked from the old end and come in at
    the new one. So a search looks at a key once for each time it came in or was pinned, however
    many pinned keys there are.

    Several lines may share one set of pinned keys; a key then moves between them with its pin.
    A policy of several lines reaches into `order`, `parked` and `free` itself where a call for
    every key would cost more than the work.

    Mutable state: `order` (keys not parked, by place), `parked` (key -> rank), `free` (a heap
    of parked keys that may leave; entries out of date are dropped when they are met),
    `_pinned`, and the ranks of the next key to park and of the one now in front.
    """

    def __init__(self, pinned: set[Key] | None = None) -> None:
        self.order: OrderedDict[Key, None] = OrderedDict()
        self.parked: dict[Key, int] = {}
        self.free: list[tuple[int, Key]] = []
        self._pinned: set[Key] = set() if pinned is None else pinned
        self._next_rank = 0
        self._front_rank = 0

    def insert(self, key: Key) -> None:
        """Add a key at the new end.

        Raises:
            KeyError: It is here.
        """
        if key in self.order or key in self.parked:
            raise KeyError(key)
        self.order[key] = None

    def touch(self, key: Key) -> None:
        """Move a key to the new end.

        Raises:
            KeyError: It is not here.
        """
        try:
            self.order.move_to_end(key)
        except KeyError:
            del self.parked[key]
            self.order[key] = None

    def remove(self, key: Key) -> None:
        """Take a key out, and its pin away.

        Raises:
            KeyError: It is not here.
        """
        self.take(key)
        self._pinned.discard(key)

    def take(self, key: Key) -> None:
        """Take a key out with its pin, to put it into another line.

        Raises:
            KeyError: It is not here.
        """
        if key in self.parked:
            del self.parked[key]
        else:
            del self.order[key]

    def pin(self, key: Key) -> None:
        """Keep a key from being found."""
        if key not in self.order and key not in self.parked:
            raise KeyError(key)
        self._pinned.add(key)

    def unpin(self, key: Key) -> None:
        """Let a key be found again, at its place."""
        if key in self._pinned:
            self._pinned.remove(key)
            if key in self.parked:
                self._push(self.parked[key], key)
        elif key not in self:
            raise KeyError(key)

    def unpark(self, key: Key) -> None:
        """Follow the unpinning of a key of this line where several share the set of pins."""
        rank = self.parked.get(key)
        if rank is not None:
            self._push(rank, key)

    def park(self, key: Key) -> None:
        """Put a key that a walk has taken out where it is met again only when it is unpinned."""
        self._next_rank += 1
        self.parked[key] = self._next_rank
        if key not in self._pinned:
            self._push(self._next_rank, key)

    def pop_parked(self, protected: Container[Key] = ()) -> Key | None:
        """Take out the oldest parked key that is neither pinned nor protected."""
        if not self.free:
            return None
        spared: list[tuple[int, Key]] = []
        found = None
        while self.free and found is None:
            rank, key = heapq.heappop(self.free)
            if self.parked.get(key) != rank or key in self._pinned:
                continue
            if key in protected:
                spared.append((rank, key))
            else:
                del self.parked[key]
                found = key
        for entry in spared:
            heapq.heappush(self.free, entry)
        return found

    def pop(self, protected: Container[Key] = ()) -> Key | None:
        """Take out the oldest key that is neither pinned nor protected; None when there is none."""
        entry = self._pop()
        if entry is None or entry[1] not in protected:
            return None if entry is None else entry[1]
        spared = [entry]
        while (entry := self._pop()) is not None and entry[1] in protected:
            spared.append(entry)
        self._put_back(spared)
        return None if entry is None else entry[1]

    def first(self) -> Key | None:
        """The oldest key that is not pinned, which stays; None when there is none."""
        while self.free:
            rank, key = self.free[0]
            if self.parked.get(key) == rank and key not in self._pinned:
                return key
            heapq.heappop(self.free)
        order = self.order
        while order:
            key = next(iter(order))
            if key not in self._pinned:
                return key
            del order[key]
            self.park(key)
        return None

    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        """Take out exactly `count` keys that are neither pinned nor protected, the oldest first.

        None when there are not that many; then nothing has changed.
        """
        if count == 1 and protected == ():
            entry = self._pop()
            return None if entry is None else [entry[1]]
        found: list[tuple[int, Key]] = []
        spared: list[tuple[int, Key]] = []
        while len(found) < count:
            entry = self._pop()
            if entry is None:
                self._put_back(spared)
                self._put_back(found)
                return None
            (spared if entry[1] in protected else found).append(entry)
        if spared:
            self._put_back(spared)
        return [key for _, key in found]

    def restore(self, keys: Sequence[Key]) -> None:
        """Put keys before all others, in this order.

        Raises:
            KeyError: One of them is here.
        """
        for key in reversed(keys):
            if key in self.order or key in self.parked:
                raise KeyError(key)
            self._front_rank -= 1
            self.parked[key] = self._front_rank
            self._push(self._front_rank, key)

    def adopt(self, other: "Line") -> None:
        """Hold what another line holds, which is not used any more, in the same order."""
        self.order, self.parked, self.free = other.order, other.parked, other.free
        self._pinned = other._pinned
        self._next_rank, self._front_rank = other._next_rank, other._front_rank

    def __len__(self) -> int:
        return len(self.order) + len(self.parked)

    def __contains__(self, key: object) -> bool:
        return key in self.order or key in self.parked

    def __iter__(self) -> Iterator[Key]:
        """All keys by place, pinned ones too."""
        yield from sorted(self.parked, key=self.parked.__getitem__)
        yield from self.order

    def check(self) -> None:
        """Compare the heap and the pins with the keys.

        Raises:
            AssertionError: They differ.
        """
        assert not self.parked.keys() & self.order.keys(), "a key stands in two places"
        free = {key for rank, key in self.free if self.parked.get(key) == rank}
        missing = self.parked.keys() - self._pinned - free
        assert not missing, "a parked key that nobody pins would never be found"

    def _pop(self) -> tuple[int, Key] | None:
        """Take out the oldest key that is not pinned, with its rank."""
        while self.free:
            rank, key = heapq.heappop(self.free)
            if self.parked.get(key) == rank and key not in self._pinned:
                del self.parked[key]
                return rank, key
        order, pinned = self.order, self._pinned
        while order:
            key = order.popitem(last=False)[0]
            self._next_rank += 1
            if key not in pinned:
                return self._next_rank, key
            self.parked[key] = self._next_rank
        return None

    def _put_back(self, entries: list[tuple[int, Key]]) -> None:
        for rank, key in entries:
            self.parked[key] = rank
            self._push(rank, key)

    def _push(self, rank: int, key: Key) -> None:
        heapq.heappush(self.free, (rank, key))
        if len(self.free) > 2 * len(self.parked) + _SLACK:
            self.free = [
                (rank, key) for key, rank in self.parked.items() if key not in self._pinned
            ]
            heapq.heapify(self.free)
