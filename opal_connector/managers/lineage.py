"""Which objects of a tier have children there: those must not leave before them."""

from collections.abc import Sequence

from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers.records import (
    PLAIN_GROUPS,
    ObjectGroup,
    ObjectKey,
    ObjectRecord,
    object_key,
)


class Lineage:
    """Children in the tier, counted by parent, whether the parent is there or not.

    Objects of groups that are no chains have no parents.

    Mutable state: `counts`, guarded by the owner of the books.
    """

    def __init__(self, groups: Sequence[ObjectGroup] = PLAIN_GROUPS) -> None:
        self.counts: dict[ObjectKey, int] = {}
        self._groups = tuple(groups)

    def __contains__(self, key: ObjectKey) -> bool:
        """Whether an object has children here."""
        return key in self.counts

    def adopt(self, parent_hash: bytes, group: int) -> ObjectKey | None:
        """Count a child; returns its parent's key if it has a parent."""
        if parent_hash == CHAIN_ROOT or not self._groups[group].is_chain:
            return None
        parent = object_key(parent_hash, group)
        self.counts[parent] = self.counts.get(parent, 0) + 1
        return parent

    def abandon(self, parent_hash: bytes, group: int) -> ObjectKey | None:
        """Take a child off; returns its parent's key if that was the last child."""
        if parent_hash == CHAIN_ROOT or not self._groups[group].is_chain:
            return None
        parent = object_key(parent_hash, group)
        self.counts[parent] -= 1
        if self.counts[parent]:
            return None
        del self.counts[parent]
        return parent

    def check(self, records: list[ObjectRecord]) -> None:
        """Raise AssertionError if the counts are not those of `records`."""
        counts: dict[ObjectKey, int] = {}
        for record in records:
            if record.parent_hash != CHAIN_ROOT and self._groups[record.group].is_chain:
                parent = object_key(record.parent_hash, record.group)
                counts[parent] = counts.get(parent, 0) + 1
        assert counts == self.counts, "children are counted wrong"
