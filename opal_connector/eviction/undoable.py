"""What the policies share that keep more than one order: pins, protection, undone evictions."""

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any

from typing_extensions import override

from opal_connector.eviction.base import EvictionPolicy, Key


class UndoablePolicy(EvictionPolicy):
    """Takes victims one by one from a subclass, and gives them back to it when they are restored.

    The capacity is not configured: it is the number of keys held when a run of evictions begins,
    because the caller evicts when its bytes are full. A run ends with the next insertion.

    Mutable state: `_held` (the subclass's own mapping of what it holds); `_pinned`; `_due`
    (restored and not used since, the next to go first); `_undo` (per victim of this run what its
    subclass needs to take it back); `_capacity`.
    """

    def __init__(self, held: Mapping[Key, Any]) -> None:
        self._held = held
        self._pinned: set[Key] = set()
        self._due: OrderedDict[Key, None] = OrderedDict()
        self._undo: dict[Key, Any] = {}
        self._capacity = 0

    @override
    def insert(self, key: Key) -> None:
        if key in self._held:
            raise KeyError(key)
        if self._undo:
            self._undo.clear()
        self._add(key)

    @override
    def touch(self, key: Key) -> None:
        self._use(key)
        if self._due:
            self._due.pop(key, None)

    @override
    def remove(self, key: Key) -> None:
        self._drop(key)
        self._pinned.discard(key)
        self._due.pop(key, None)

    @override
    def pin(self, key: Key) -> None:
        if key not in self._held:
            raise KeyError(key)
        self._pinned.add(key)

    @override
    def unpin(self, key: Key) -> None:
        if key in self._pinned:
            self._pinned.remove(key)
            self._free(key)
        elif key not in self._held:
            raise KeyError(key)

    @override
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        held_count = len(self._held)
        if count > held_count - len(self._pinned):
            return None
        if protected != () and not self._can_spare(count, protected):
            return None
        if not self._undo:
            self._capacity = held_count
        if count == 1 and not self._due:
            key = self._choose(protected)
            self._undo[key] = self._expel(key)
            return [key]
        victims: list[Key] = []
        while len(victims) < count:
            key = self._next_due(protected) if self._due else None
            if key is None:
                key = self._choose(protected)
            else:
                del self._due[key]
                self._withdraw(key)
            self._undo[key] = self._expel(key)
            victims.append(key)
        return victims

    @override
    def expel(self, key: Key) -> None:
        if key not in self._held:
            raise KeyError(key)
        if not self._undo:
            self._capacity = len(self._held)
        self._pinned.discard(key)
        self._due.pop(key, None)
        self._withdraw(key)
        self._undo[key] = self._expel(key)

    @override
    def restore(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self:
                raise KeyError(key)
            self._take_back(key, self._undo.pop(key))
            self._due[key] = None
            self._due.move_to_end(key, last=False)

    @override
    def __len__(self) -> int:
        return len(self._held)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._held

    @override
    def check(self) -> None:
        assert all(key in self for key in self._pinned), "a pin of nothing"
        assert all(key in self for key in self._due), "a key that is not held is due"
        assert not any(key in self for key in self._undo), "a key is held and evicted"

    def _can_spare(self, count: int, protected: Container[Key]) -> bool:
        free = (key for key in self._held if key not in self._pinned and key not in protected)
        return len(list(islice(free, count))) == count

    def _next_due(self, protected: Container[Key]) -> Key | None:
        for key in self._due:
            if key not in self._pinned and key not in protected:
                return key
        return None

    @abstractmethod
    def _add(self, key: Key) -> None:
        """Take in a key that is not held."""

    @abstractmethod
    def _use(self, key: Key) -> None:
        """Record an access; KeyError when the key is not held."""

    @abstractmethod
    def _drop(self, key: Key) -> None:
        """Forget a key without a ghost; KeyError when it is not held."""

    @abstractmethod
    def _free(self, key: Key) -> None:
        """Make a key findable whose pin has just gone."""

    @abstractmethod
    def _choose(self, protected: Container[Key]) -> Key:
        """Withdraw and return the least valuable key that may leave; there is one."""

    @abstractmethod
    def _withdraw(self, key: Key) -> None:
        """Take a given key out of the order it stands in."""

    @abstractmethod
    def _expel(self, key: Key) -> Any:
        """Forget a withdrawn key, leave its ghost, and return what `_take_back` needs."""

    @abstractmethod
    def _take_back(self, key: Key, record: Any) -> None:
        """Undo `_withdraw` and `_expel`; the key counts as the oldest of its order."""
