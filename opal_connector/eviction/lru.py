"""Least recently used, over keys that may be pinned."""

from opal_connector.eviction.base import EvictionPolicy
from opal_connector.eviction.line import Line


class LRUPolicy(Line, EvictionPolicy):
    """Evicts the key whose last access is oldest: one line, and every access leads to its end.

    Mutable state: that of a line.
    """

    def check(self) -> None:
        """Besides what a line checks: everything pinned is held."""
        super().check()
        assert all(key in self for key in self._pinned), "a pin of nothing"
