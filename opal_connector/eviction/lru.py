"""Least recently used, over keys that may be pinned."""

from typing_extensions import override

from opal_connector.eviction.base import Key
from opal_connector.eviction.handover import Candidate, Handover
from opal_connector.eviction.line import Line


class LRUPolicy(Line, Candidate):
    """Evicts the key whose last access is oldest: one line, and every access leads to its end.

    Mutable state: that of a line.
    """

    @override
    def renew(self, key: Key) -> None:
        self.touch(key)

    def check(self) -> None:
        """Besides what a line checks: everything pinned is held."""
        super().check()
        assert all(key in self for key in self._pinned), "a pin of nothing"

    @override
    def hand_over(self) -> Handover:
        once = Line()
        once.adopt(self)
        return Handover(once, Line(self._pinned), self._pinned)

    @override
    def take_over(self, order: Handover) -> None:
        self._pinned = order.pinned
        self.order.update((key, None) for key, _ in order.by_age())
