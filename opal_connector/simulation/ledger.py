"""What the events say: how many of every kind, and what is where when all are believed."""

from collections import Counter

from opal_connector.events import Copy, Delete, EventLog, Insert, KVCEvent, Move
from opal_connector.managers import OpalKVCacheManager, object_key


class EventLedger:
    """Follows the event log of a manager.

    Mutable state: `counts` by kind, and the contents of every tier by object key.
    """

    def __init__(self, manager: OpalKVCacheManager, log: EventLog) -> None:
        self.counts = dict.fromkeys(("INSERT", "DELETE", "MOVE", "COPY"), 0)
        self._manager = manager
        self._log = log
        self._contents: Counter[tuple[str, bytes]] = Counter()

    def take(self) -> list[KVCEvent]:
        """Believe the events since the last call, and return them."""
        if not len(self._log):
            return []
        events = self._manager.take_events()
        for event in events:
            key = object_key(event.fact.chunk_hash, event.fact.group)
            match event:
                case Insert(tier=tier):
                    self._count("INSERT", key, arrived=tier)
                case Delete(tier=tier):
                    self._count("DELETE", key, left=tier)
                case Move(source_tier=source, target_tier=target):
                    self._count("MOVE", key, arrived=target, left=source)
                case Copy(target_tier=target):
                    self._count("COPY", key, arrived=target)
        return events

    def check(self) -> None:
        """Compare what the events say with what the tiers hold.

        Raises:
            AssertionError: They differ.
        """
        self.take()
        said = {place: count for place, count in self._contents.items() if count}
        held = dict.fromkeys(self._manager.storage.placements(), 1)
        assert said == held, "the replayed events are not the contents of the tiers"

    def _count(self, kind: str, key: bytes, *, arrived: str = "", left: str = "") -> None:
        self.counts[kind] += 1
        if arrived:
            self._contents[arrived, key] += 1
        if left:
            self._contents[left, key] -= 1
            if not self._contents[left, key]:
                del self._contents[left, key]
