"""The bound that no policy can pass: eviction that knows the future."""

import heapq
from collections.abc import Sequence


class Belady:
    """Evicts the leaf that is needed last, and stores nothing in vain.

    Leaf-only, as the books of a tier are: a block whose next block is stored stays.

    Mutable state: the stored blocks with parent, child count and coming uses, a heap of leaves by
    next use whose entries may be out of date, and the number of the request.
    """

    def __init__(
        self,
        chains: Sequence[Sequence[bytes]],
        capacity: int,
        usable: Sequence[int] | None = None,
    ) -> None:
        """Learn the future.

        Args:
            chains: The keys of every request to come, head first.
            capacity: How many blocks can be stored.
            usable: How many blocks of each request a cache can bring; all, if None.
        """
        self._usable = [len(keys) for keys in chains] if usable is None else list(usable)
        self._uses: dict[bytes, list[int]] = {}
        for number in range(len(chains) - 1, -1, -1):
            for key in chains[number][: self._usable[number]]:
                self._uses.setdefault(key, []).append(number)
        self._never = len(chains)
        self._capacity = capacity
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, int] = {}
        self._leaves: list[tuple[int, bytes]] = []
        self._number = 0

    def request(self, keys: Sequence[bytes]) -> int:
        """Serve the next request, and return how many of its blocks were there."""
        usable = self._usable[self._number]
        found = 0
        while found < usable and keys[found] in self._parents:
            found += 1
        for key in keys[:usable]:
            self._uses[key].pop()
        self._number += 1
        if found:
            self._offer(keys[found - 1])
        parent = keys[found - 1] if found else None
        for key in keys[found:]:
            if key in self._parents:  # there, and not usable this time
                parent = key
                continue
            if self._next_use(key) == self._never:
                break
            if len(self._parents) >= self._capacity and not self._evict(key, parent):
                break
            self._parents[key] = parent
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            self._offer(key)
            parent = key
        return found

    def _next_use(self, key: bytes) -> int:
        uses = self._uses.get(key)
        return uses[-1] if uses else self._never

    def _offer(self, key: bytes) -> None:
        heapq.heappush(self._leaves, (-self._next_use(key), key))

    def _evict(self, newcomer: bytes, parent: bytes | None) -> bool:
        spared = None
        has_room = False
        while self._leaves:
            entry = heapq.heappop(self._leaves)
            use, key = -entry[0], entry[1]
            if key not in self._parents or key in self._children or use != self._next_use(key):
                continue
            if key == parent:
                spared = entry
                continue
            if use <= self._next_use(newcomer):
                heapq.heappush(self._leaves, entry)
                break
            self._drop(key)
            has_room = True
            break
        if spared is not None:
            heapq.heappush(self._leaves, spared)
        return has_room

    def _drop(self, key: bytes) -> None:
        above = self._parents.pop(key)
        if above is None:
            return
        self._children[above] -= 1
        if not self._children[above]:
            del self._children[above]
            self._offer(above)
