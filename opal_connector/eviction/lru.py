"""Least recently used, over keys that may be pinned."""

from collections import OrderedDict
from collections.abc import Container, Sequence

from typing_extensions import override

from opal_connector.eviction.base import EvictionPolicy, Key


class LRUPolicy(EvictionPolicy):
    """Evicts the key whose last access is oldest.

    Pinned keys keep their place in the order and are passed over. What is pinned is in use or leads
    to something used later, so it stands far from the old end and little is passed over.

    Mutable state: `_order` (all keys, the oldest access first) and `_pinned`.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._pinned: set[Key] = set()

    @override
    def insert(self, key: Key) -> None:
        if key in self._order:
            raise KeyError(key)
        self._order[key] = None

    @override
    def touch(self, key: Key) -> None:
        self._order.move_to_end(key)

    @override
    def remove(self, key: Key) -> None:
        del self._order[key]
        self._pinned.discard(key)

    @override
    def pin(self, key: Key) -> None:
        if key not in self._order:
            raise KeyError(key)
        self._pinned.add(key)

    @override
    def unpin(self, key: Key) -> None:
        if key not in self._order:
            raise KeyError(key)
        self._pinned.discard(key)

    @override
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        victims: list[Key] = []
        if count > len(self._order) - len(self._pinned):
            return None
        for key in self._order:
            if len(victims) == count:
                break
            if key not in self._pinned and key not in protected:
                victims.append(key)
        if len(victims) < count:
            return None
        for key in victims:
            del self._order[key]
        return victims

    @override
    def restore(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self.insert(key)
            self._order.move_to_end(key, last=False)

    @override
    def __len__(self) -> int:
        return len(self._order)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._order

    @override
    def check(self) -> None:
        assert self._pinned <= self._order.keys()
