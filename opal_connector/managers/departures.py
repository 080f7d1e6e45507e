"""Who leaves a tier next: its policy, with parents and promised objects kept out of its reach."""

from collections.abc import Sequence

from opal_connector.eviction import EvictionPolicy
from opal_connector.managers.lineage import Lineage
from opal_connector.managers.object_index import ObjectIndex
from opal_connector.managers.records import ObjectKey, ObjectRecord


class Departures:
    """The eviction policy of one tier, told about objects instead of keys.

    Mutable state: the policy and `_lineage` (children stored in the tier), guarded by the owner
    of the books.
    """

    def __init__(self, policy: EvictionPolicy, index: ObjectIndex) -> None:
        self._policy = policy
        self._index = index
        self._lineage = Lineage()

    def adopt(self, parent_hash: bytes, group: int) -> None:
        """Keep a parent in the tier for a child that is here or coming."""
        parent = self._lineage.adopt(parent_hash, group)
        if parent is not None and parent in self._index.records:
            self._policy.pin(parent)

    def abandon(self, parent_hash: bytes, group: int) -> None:
        """A child has left or will not come: its parent may go if that was the last."""
        parent = self._lineage.abandon(parent_hash, group)
        record = self._index.records.get(parent) if parent is not None else None
        if record is not None:
            self.settle(record)

    def enter(self, record: ObjectRecord) -> None:
        """Add an object whose parent was adopted; it stays until it is settled."""
        self._policy.insert(record.key)
        self._policy.pin(record.key)

    def leave(self, record: ObjectRecord) -> None:
        """Forget an object that left by other means than `evict`."""
        self._policy.remove(record.key)
        self.abandon(record.parent_hash, record.group)

    def hold(self, key: ObjectKey) -> None:
        """Keep an object until it is settled."""
        self._policy.pin(key)

    def settle(self, record: ObjectRecord) -> None:
        """Make an indexed object evictable if nothing keeps it."""
        if not record.is_held and record.key not in self._lineage:
            self._policy.unpin(record.key)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Record one use of a chain, given head first; the head counts as used last."""
        for key in reversed(keys):
            if key in self._index.records:
                self._policy.touch(key)

    def next_victims(self, limit: int) -> list[ObjectRecord]:
        """The objects that would leave first, at most `limit` of them. Nothing changes."""
        keys: list[ObjectKey] = []
        while len(keys) < limit:
            chosen = self._policy.evict(1)
            if chosen is None:
                break
            keys += chosen
        self._policy.restore(keys)
        return [self._index.records[key] for key in keys]

    def evict(self, size_bytes: int, *, limit: int | None = None) -> list[ObjectRecord] | None:
        """Choose objects of `size_bytes` together, no more than it takes, tails before heads.

        They have left the order; the caller takes them out of the index. Without `limit` it is all
        or nothing: None changes nothing. With it, as many as there are and at most so many.
        """
        victims: list[ObjectRecord] = []
        while size_bytes > 0 and (limit is None or len(victims) < limit):
            chosen = self._policy.evict(1)
            if chosen is None:
                if limit is not None:
                    break
                self._policy.restore([record.key for record in victims])
                for record in victims:
                    self.adopt(record.parent_hash, record.group)
                return None
            record = self._index.records[chosen[0]]
            self.abandon(record.parent_hash, record.group)  # the parent may be the next
            size_bytes -= record.size_bytes
            victims.append(record)
        return victims

    def check(self) -> None:
        """Raise AssertionError if it disagrees with the index."""
        self._policy.check()
        records = list(self._index.records.values())
        assert len(self._policy) == len(records)
        self._lineage.check(records)
