"""The contract of an eviction policy."""

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from typing import Any

Key = Any  # bytes in production, integers in tests


class EvictionPolicy(ABC):
    """An order over keys, some of which are pinned.

    No method looks at bytes, time or anything outside. A key is inserted once, and leaves by
    `remove` (somebody asked) or by `evict` and `expel` (room was needed).
    """

    @abstractmethod
    def insert(self, key: Key) -> None:
        """Add a key that the policy does not hold, unpinned and most recently used.

        Raises:
            KeyError: The key is held already.
        """

    @abstractmethod
    def touch(self, key: Key) -> None:
        """Record an access to a held key, pinned or not.

        Raises:
            KeyError: The key is not held.
        """

    def renew(self, key: Key) -> None:
        """Record that an access goes on until now; it is no other one. Most do not care.

        A policy that tells one access from several must not take this for the second one.

        Raises:
            KeyError: The key is not held, as far as the policy looks.
        """
        del key

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Forget a held key.

        Raises:
            KeyError: The key is not held.
        """

    @abstractmethod
    def pin(self, key: Key) -> None:
        """Make a held key unevictable until `unpin`. Pinning twice is pinning once."""

    @abstractmethod
    def unpin(self, key: Key) -> None:
        """Make a held key evictable again, at the place that its accesses gave it."""

    @abstractmethod
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        """Forget and return exactly `count` keys, the least valuable first.

        None when there are not that many keys that are neither pinned nor protected; then nothing
        has changed.
        """

    def expel(self, key: Key) -> None:
        """Evict this very key, pinned or not; `restore` undoes it.

        A policy that remembers what it has evicted remembers it as well.

        Raises:
            KeyError: The key is not held.
        """
        self.remove(key)

    @abstractmethod
    def restore(self, keys: Sequence[Key]) -> None:
        """Undo an eviction: `keys`, as `evict` gave them, are the next to go again, in that order.

        Raises:
            KeyError: One of them is held.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    @abstractmethod
    def check(self) -> None:
        """Recompute every derived structure and compare.

        Raises:
            AssertionError: They differ.
        """
