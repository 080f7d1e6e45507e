"""Who leaves a tier next: its policy, with parents and promised objects kept out of its reach."""

from collections.abc import Callable, Container, Sequence
from itertools import islice

from opal_connector.eviction import EvictionPolicy
from opal_connector.managers.lineage import Lineage
from opal_connector.managers.object_index import ObjectIndex
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.records import (
    PLAIN_GROUPS,
    ObjectGroup,
    ObjectKey,
    ObjectRecord,
)
from opal_connector.managers.unwanted import Reason, Unwanted


class Departures:
    """The eviction policy of one tier, told about objects instead of keys.

    With quotas every owner has an order of its own. Room for an owner who has reached his quota
    comes from what is his, any other from the owner who uses most of what he may.

    Mutable state: a policy and the bytes per owner, `_lineage` (children stored in the tier),
    `_kept` (objects that should stay until a time), `_unwanted` (objects that go before all others)
    and `_taken` (those of them that the present eviction chose, and why); guarded by the owner of
    the books.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        index: ObjectIndex,
        quotas: Quotas | None = None,
        capacity_bytes: Callable[[], int] = lambda: 0,
        *,
        groups: Sequence[ObjectGroup] = PLAIN_GROUPS,
    ) -> None:
        self._index = index
        self._quotas = quotas or Quotas()
        self._capacity_bytes = capacity_bytes
        self._make_policy = type(policy)
        self._policies: dict[str, EvictionPolicy] = {"": policy}
        self._owned_bytes: dict[str, int] = {}
        self._lineage = Lineage(groups)
        self._kept: dict[ObjectKey, float] = {}
        self._unwanted = Unwanted()
        self._taken: dict[ObjectKey, tuple[Reason, ...]] = {}

    # ---- coming and staying ----

    def adopt(self, parent_hash: bytes, group: int) -> None:
        """Keep a parent in the tier for a child that is here or coming."""
        parent = self._lineage.adopt(parent_hash, group)
        record = self._index.records.get(parent) if parent is not None else None
        if record is not None:
            self.hold(record)

    def abandon(self, parent_hash: bytes, group: int) -> None:
        """A child has left or will not come: its parent may go if that was the last."""
        parent = self._lineage.abandon(parent_hash, group)
        record = self._index.records.get(parent) if parent is not None else None
        if record is not None:
            self.settle(record)

    def enter(self, record: ObjectRecord) -> None:
        """Add an object whose parent was adopted; it stays until it is settled."""
        policy = self._policies.get(record.owner)
        if policy is None:
            policy = self._policies[record.owner] = self._make_policy()
        policy.insert(record.key)
        policy.pin(record.key)
        self._count(record, record.size_bytes)

    def leave(self, record: ObjectRecord) -> None:
        """Forget an object that left by other means than `evict`."""
        self._policies[record.owner].remove(record.key)
        self._gone(record)
        self.abandon(record.parent_hash, record.group)

    def hold(self, record: ObjectRecord) -> None:
        """Keep an object until it is settled."""
        self._policies[record.owner].pin(record.key)

    def settle(self, record: ObjectRecord) -> None:
        """Make an indexed object evictable if nothing keeps it."""
        if self.may_leave(record) and record.key not in self._kept:
            self._policies[record.owner].unpin(record.key)

    def may_leave(self, record: ObjectRecord) -> bool:
        """Whether nobody relies on an object and nothing here continues it."""
        return not record.is_held and record.key not in self._lineage

    def touch(self, keys: Sequence[ObjectKey], counted: Container[ObjectKey] = ()) -> None:
        """Record one use of a chain, given head first; the head counts as used last.

        Of what is in `counted` the use has been recorded, by storing or loading it; it ends now.
        """
        records = self._index.records
        for key in reversed(keys):
            record = records.get(key)
            if record is not None:
                policy = self._policies[record.owner]
                if key in counted:
                    policy.renew(key)
                else:
                    policy.touch(key)
                self._unwanted.discard(record)
                record.is_passing, record.is_used = False, True

    def discourage(self, keys: Sequence[ObjectKey]) -> None:
        """Let the end of a chain, given head first, go before all others, until it is used again.

        What other chains share with it, a head with more than one child, is not meant.
        """
        for key in reversed(keys):
            if key not in self._index.records:
                continue
            if self._lineage.counts.get(key, 0) > 1:
                return
            self._unwanted.add(self._index.records[key], Reason.UNEXPECTED)

    def give_up(self, record: ObjectRecord) -> None:
        """Let an indexed object be one of the first to go: no request can use it.

        Of a chain its end must be given up first, or each eviction has to pass those before it.
        """
        if record.key in self._policies[record.owner]:  # else it is on its way out
            self._unwanted.add(record, Reason.WORTHLESS)

    def want_again(self, record: ObjectRecord) -> None:
        """Undo `give_up`; what nobody was expected to come for is expected no more than before."""
        self._unwanted.discard(record, [Reason.WORTHLESS])

    def keep(self, keys: Sequence[ObjectKey], until: float) -> None:
        """Evict these last, until that time (monotonic seconds)."""
        for key in keys:
            record = self._index.records.get(key)
            if record is not None:
                self._kept[key] = max(until, self._kept.get(key, until))
                self.hold(record)

    def end_keeping(self, now: float) -> None:
        """Treat like others what should have stayed until now."""
        for key in [key for key, until in self._kept.items() if until <= now]:
            self._end_keeping(key)

    # ---- leaving ----

    def next_victims(self, limit: int) -> list[ObjectRecord]:
        """The objects that would leave first, at most `limit` of them. Nothing changes."""
        policy = self._policies[self._fullest_owner()]
        keys: list[ObjectKey] = []
        unwanted = list(islice(filter(self._may_leave_first, self._unwanted), limit))
        while len(keys) < limit - len(unwanted):
            chosen = policy.evict(1)
            if chosen is None:
                break
            keys += chosen
        policy.restore(keys)
        records = (self._index.records[key] for key in keys)
        others = [record for record in records if record not in self._unwanted]
        return [*unwanted, *others]

    def shortfall_bytes(self, owner: str, size_bytes: int) -> int:
        """By how much an object of that size would pass its owner's quota."""
        if not self._quotas:
            return 0
        limit_bytes = self._quotas.limit_bytes(owner, self._capacity_bytes())
        return self._owned_bytes.get(owner, 0) + size_bytes - limit_bytes

    def evict(
        self,
        size_bytes: int,
        *,
        owner: str | None = None,
        limit: int | None = None,
        only_unwanted: bool = False,
        before: Sequence[ObjectRecord] = (),
    ) -> list[ObjectRecord] | None:
        """Choose objects of `size_bytes` together, no more than it takes, tails before heads.

        They have left the order; the caller takes them out of the index. Without `limit` it is all
        or nothing: None changes nothing. With it, as many as there are and at most so many. Only
        those of `owner`, if one is given; only what goes before all others with `only_unwanted`.
        What was chosen `before` belongs to the same all or nothing.
        """
        if not before:
            self._taken.clear()
        victims: list[ObjectRecord] = []
        while size_bytes > 0 and (limit is None or len(victims) < limit):
            payer = self._fullest_owner() if owner is None else owner
            chosen = self._choose(payer, only_unwanted=only_unwanted)
            if chosen is None:
                if limit is not None:
                    break
                self.take_back([*before, *victims])
                return None
            self.abandon(chosen.parent_hash, chosen.group)  # the parent may be the next
            self._gone(chosen)
            size_bytes -= chosen.size_bytes
            victims.append(chosen)
        return victims

    def take_back(self, victims: Sequence[ObjectRecord]) -> None:
        """Undo an `evict`: its victims are the next to go again."""
        for record in reversed(victims):  # first: nothing evicted comes back after an insertion
            if not self._is_removed(record):
                self._policies[record.owner].restore([record.key])
        for record in reversed(victims):
            if self._is_removed(record):
                self._policies[record.owner].insert(record.key)
            self._unwanted.put_back(record, self._taken.get(record.key, ()))
            self._count(record, record.size_bytes)
        for record in victims:
            self.adopt(record.parent_hash, record.group)

    def check(self) -> None:
        """Raise AssertionError if it disagrees with the index."""
        records = list(self._index.records.values())
        assert sum(len(policy) for policy in self._policies.values()) == len(records)
        owned: dict[str, int] = {}
        for record in records:
            assert record.key in self._policies[record.owner]
            owned[record.owner] = owned.get(record.owner, 0) + record.size_bytes
        if self._quotas:
            assert {name: size for name, size in self._owned_bytes.items() if size} == owned
        for policy in self._policies.values():
            policy.check()
        assert self._kept.keys() <= self._index.records.keys()
        assert all(map(self._index.is_current, self._unwanted))
        self._lineage.check(records)

    # ---- inside ----

    def _choose(self, owner: str, *, only_unwanted: bool = False) -> ObjectRecord | None:
        """The next to go; of what should stay a while only when there is nothing else."""
        policy = self._policies.get(owner)
        if policy is None:
            return None
        unwanted = self._unwanted.first(owner, self._may_leave_first)
        if unwanted is not None:
            self._taken[unwanted.key] = self._unwanted.reasons(unwanted)
            if self._is_removed(unwanted):
                policy.remove(unwanted.key)
            else:
                policy.expel(unwanted.key)
            return unwanted
        if only_unwanted:
            return None
        chosen = policy.evict(1)
        while chosen is None:
            soonest = self._soonest_kept(owner)
            if soonest is None:
                return None
            self._end_keeping(soonest)
            chosen = policy.evict(1)
        return self._index.records[chosen[0]]

    def _is_removed(self, record: ObjectRecord) -> bool:
        """Whether the policy was to forget a victim: what was wanted once it remembers."""
        return record.key in self._taken and record.is_passing

    def _may_leave_first(self, record: ObjectRecord) -> bool:
        return record.key not in self._kept and self.may_leave(record)

    def _soonest_kept(self, owner: str) -> ObjectKey | None:
        kept = [key for key in self._kept if self._index.records[key].owner == owner]
        return min(kept, key=self._kept.__getitem__, default=None)

    def _end_keeping(self, key: ObjectKey) -> None:
        del self._kept[key]
        self.settle(self._index.records[key])

    def _fullest_owner(self) -> str:
        """Who uses most of what he may."""
        if len(self._policies) == 1:
            return ""
        capacity_bytes = self._capacity_bytes()
        return max(
            self._owned_bytes,
            key=lambda owner: (
                self._owned_bytes[owner] / max(1, self._quotas.limit_bytes(owner, capacity_bytes))
            ),
        )

    def _count(self, record: ObjectRecord, size_bytes: int) -> None:
        if self._quotas:
            owned_bytes = self._owned_bytes.get(record.owner, 0) + size_bytes
            self._owned_bytes[record.owner] = owned_bytes

    def _gone(self, record: ObjectRecord) -> None:
        self._count(record, -record.size_bytes)
        self._kept.pop(record.key, None)
        self._unwanted.discard(record)
