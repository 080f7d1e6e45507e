"""LRU as it is defined, for comparison."""

from collections.abc import Container, Sequence

from typing_extensions import override

from opal_connector.eviction import EvictionPolicy


class NaiveLRU(EvictionPolicy):
    """The definition: one list, the least recently used key first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.pinned: set[int] = set()

    @override
    def insert(self, key: int) -> None:
        self.order.append(key)

    @override
    def touch(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)

    @override
    def remove(self, key: int) -> None:
        self.order.remove(key)
        self.pinned.discard(key)

    @override
    def pin(self, key: int) -> None:
        self.pinned.add(key)

    @override
    def unpin(self, key: int) -> None:
        self.pinned.discard(key)

    @override
    def evict(self, count: int, protected: Container[int] = ()) -> list[int] | None:
        free = [key for key in self.order if key not in self.pinned and key not in protected]
        if count > len(free):
            return None
        for key in free[:count]:
            self.order.remove(key)
        return free[:count]

    @override
    def restore(self, keys: Sequence[int]) -> None:
        self.order = [*keys, *self.order]

    @override
    def __len__(self) -> int:
        return len(self.order)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.order

    @override
    def check(self) -> None:
        return
