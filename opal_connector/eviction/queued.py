"""A policy whose keys stand in one of several lines."""

from typing import Any

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.handover import Handover
from opal_connector.eviction.line import Line
from opal_connector.eviction.undoable import UndoablePolicy


class QueuedPolicy(UndoablePolicy):
    """Knows in which of its lines a key stands; the subclass moves keys between them.

    Mutable state besides the base's: `_home` (key -> its line) and the lines, which share the pins.
    """

    def __init__(self) -> None:
        self._home: dict[Key, Line] = {}
        super().__init__(self._home)

    @override
    def check(self) -> None:
        super().check()
        for line in set(self._home.values()):
            line.check()
            assert all(self._home.get(key) is line for key in line), "a key stands elsewhere"
        assert all(key in line for key, line in self._home.items()), "a key stands nowhere"

    @override
    def _drop(self, key: Key) -> None:
        self._home.pop(key).take(key)

    @override
    def _free(self, key: Key) -> None:
        line = self._home[key]
        if key in line.parked:
            line.unpark(key)

    @override
    def _withdraw(self, key: Key) -> None:
        self._home[key].take(key)

    @override
    def _expel(self, key: Key) -> Any:
        return self._home.pop(key)

    @override
    def _take_back(self, key: Key, record: Any) -> None:
        line: Line = record
        self._home[key] = line
        line.restore([key])

    def _begin_with(self, order: Handover) -> tuple[Line, Line]:
        """The lines of another policy's order, to begin with."""
        self._pinned = order.pinned
        self._capacity = order.capacity
        self._home.update(dict.fromkeys(order.once, order.once))
        self._home.update(dict.fromkeys(order.often, order.often))
        return order.once, order.often

    def _place(self, key: Key, line: Line) -> None:
        """Put a key that stands nowhere at the new end of a line."""
        self._home[key] = line
        line.insert(key)
