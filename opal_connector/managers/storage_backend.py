"""The books of one tier: index, sizes, leases, order of eviction.

Only a leaf can be evicted: an object whose next chunk is in the tier is pinned in the policy, so
the tail of a prefix always leaves before its head, whatever the policy.
"""

import time
from collections.abc import Callable, Container, Sequence

from opal_connector.events import Delete, EventLog, Insert, KVCEvent, ObjectFact
from opal_connector.eviction import EvictionPolicy
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.managers.departures import Departures
from opal_connector.managers.expiry import Expiry
from opal_connector.managers.leaving import LeavingObjects
from opal_connector.managers.object_index import ObjectIndex
from opal_connector.managers.quotas import Quotas
from opal_connector.managers.records import (
    PLAIN_GROUPS,
    ObjectGroup,
    ObjectKey,
    ObjectRecord,
    ObjectSpec,
    ObjectState,
    object_key,
)
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.room import Room
from opal_connector.managers.tier_pool import Space
from opal_connector.managers.watermarks import TierLimits, Watermarks
from opal_connector.transfers import ObjectName, TierHealth

Announce = Callable[[ObjectFact], KVCEvent]
_EVICTIONS_AT_ONCE = 64  # files chosen in one step: bounds the time that it takes


class OpalStorageBackend:
    """One tier's index over objects, without their bytes.

    Mutable state: `health`, `index`, `leaving`, `_orphans`, `order` (who leaves next), `expiry`,
    the space and the counters; guarded by the lock of the manager that owns the tier.
    """

    def __init__(
        self,
        *,
        tier: str,
        space: Space,
        policy: EvictionPolicy,
        log: EventLog,
        limits: TierLimits | None = None,
        groups: Sequence[ObjectGroup] = PLAIN_GROUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.space = space
        self.groups = tuple(groups)
        self._clock = clock
        self.health = TierHealth.OK
        self.generation = 0
        self.eviction_count = 0
        self.neighbours: tuple[OpalStorageBackend, ...] = ()
        self.leaving = LeavingObjects(space)
        limits = limits or TierLimits()
        self.levels = Watermarks(space, self.leaving, limits)
        self._log = log
        self.index = ObjectIndex()
        quotas = Quotas(limits.quotas)
        self.order = Departures(
            policy, self.index, quotas, lambda: space.capacity_bytes, groups=self.groups
        )
        self._room = Room(space, self.levels, self.order, self.groups, self._evict)
        self.expiry = Expiry(limits.ttl_seconds)
        # Written, and waiting for their parent to be: parent key -> what `commit` was given.
        self._orphans: dict[ObjectKey, list[tuple[ObjectRecord, Announce]]] = {}

    def __repr__(self) -> str:
        return (
            f"<OpalStorageBackend {self.tier}: {len(self.index.records)} objects, "
            f"{self.used_bytes}/{self.capacity_bytes} bytes, {len(self.leaving)} leaving>"
        )

    def __len__(self) -> int:
        return len(self.index.records)

    @property
    def used_bytes(self) -> int:
        """Bytes of everything that is not free."""
        return self.space.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """The limit for `used_bytes`."""
        return self.space.capacity_bytes

    @property
    def is_readable(self) -> bool:
        """Whether loads can be asked of the tier now."""
        return self.health is TierHealth.OK or self.health is TierHealth.NO_SPACE

    # ---- reading ----

    def get(self, key: ObjectKey) -> ObjectRecord | None:
        """The object of that key, if it can be read now."""
        return self.index.get(key) if self.is_readable else None

    def knows(self, key: ObjectKey) -> bool:
        """Whether it is here or coming, readable now or not."""
        return key in self.index.records

    def contains(self, key: ObjectKey) -> bool:
        """Whether a load of `key` could be planned now."""
        return self.get(key) is not None

    def batched_contains(self, keys: Sequence[ObjectKey]) -> int:
        """How many keys from the first on are readable without a gap."""
        missing = (count for count, key in enumerate(keys) if not self.contains(key))
        return next(missing, len(keys))

    def longest_run(self, wanted: bytes, group: int) -> tuple[ObjectRecord | None, int]:
        """The readable object that shares most blocks with `wanted`, and how many."""
        return self.index.longest_run(wanted, group) if self.is_readable else (None, 0)

    def holds(self, spec: ObjectSpec) -> bool:
        """Whether storing `spec` would bring nothing: it is here or coming, or a longer one is."""
        return self.index.holds(spec)

    # ---- storing ----

    def reserve(self, spec: ObjectSpec) -> ObjectRecord | Refusal:
        """Make room for an object and enter it as WRITING.

        Evicts only what is missing. The parent cannot leave while its child is here or coming.
        """
        refusal = self._refuse(spec)
        if refusal is not None:
            return refusal
        self.order.adopt(spec.parent_hash, spec.group)
        rows = self._room.make(spec)
        if rows is None:
            self.order.abandon(spec.parent_hash, spec.group)
            return Refusal.FULL
        record = self._record(spec, rows)
        self.index.begin_write(record)
        self.order.enter(record)
        return record

    def commit(
        self, record: ObjectRecord, *, stored: bool, announce: Announce | None = None
    ) -> bool:
        """End a write: READY and an event (an INSERT by default), or as if never planned.

        A parent is announced before its child: a child that is written first becomes READY with
        its parent, or is dropped with it.

        Returns:
            Whether the object is there now or will be with its parent. Not so when the write
            failed, when the tier was reset meanwhile, when a longer object that begins with it
            came first, or when its parent is gone.
        """
        announce = announce or self._insert
        if not self.index.is_current(record):
            record.state = ObjectState.ABSENT
            self.leaving.release(record)
            return False
        parent_key = self._parent_key(record)
        if stored and parent_key is not None:
            if self._is_parent_coming(parent_key):
                self._orphans.setdefault(parent_key, []).append((record, announce))
                return True
            stored = self._is_known(parent_key)
        shared_blocks = self.index.end_write(record)
        is_new = shared_blocks * HASH_BYTES < len(record.run)
        if stored and is_new:
            self._publish(record, shared_blocks, announce)
        else:
            record.state = ObjectState.ABSENT
            self.index.drop_write(record)
            self._forget(record)
        for child, child_announce in self._orphans.pop(record.key, ()):
            self.commit(child, stored=stored, announce=child_announce)
        return stored and is_new

    def adopt(self, name: ObjectName, owner: str = "") -> bool:
        """Enter an object that was here before this process, as used more recently than others.

        Returns whether it is new; what is here, coming or leaving stays as it is.
        """
        if not self._has_group_of(name):
            return False
        spec = ObjectSpec(name.group, name.parent_hash, name.run, first_block=0, owner=owner)
        if self.index.holds(spec) or self.leaving.is_named(spec.key):
            return False
        rows = self.space.allocate(spec.block_count, name.members, force=True)
        if rows is None:
            return False
        self.order.adopt(spec.parent_hash, spec.group)
        record = self._record(spec, rows)
        self.order.enter(record)
        shared_blocks = self.index.shared_blocks(record.run, record.group)
        self._publish(record, shared_blocks, self._insert)
        return True

    def discard(self, name: ObjectName) -> None:
        """Have an object deleted that was here before this process and cannot be used."""
        spec = ObjectSpec(name.group, name.parent_hash, name.run, first_block=0)
        is_here = self.knows(spec.key) or self.leaving.is_named(spec.key)
        if is_here or not self._has_group_of(name):
            return
        rows = self.space.allocate(spec.block_count, name.members, force=True)
        if rows is not None:
            self.leaving.free(self._record(spec, rows))

    # ---- promises ----

    def pin(self, record: ObjectRecord, *, loading: bool = False) -> None:
        """Promise the rows of a readable object to somebody, until `unpin`."""
        record.leases += 1
        if loading:
            record.loads += 1
            record.state = ObjectState.LOADING
        if record.leases == 1 and self.index.is_current(record):
            self.order.hold(record)

    def unpin(self, record: ObjectRecord, *, loading: bool = False) -> None:
        """End one promise. Rows of an object that was removed meanwhile become free."""
        assert record.leases > 0, "unpinned more often than pinned"
        record.leases -= 1
        if loading:
            record.loads -= 1
            if not record.loads and record.state is ObjectState.LOADING:
                record.state = ObjectState.READY
        if self.index.is_current(record):
            self.order.settle(record)
        else:
            self.leaving.release(record)

    def touch(self, keys: Sequence[ObjectKey], counted: Container[ObjectKey] = ()) -> None:
        """Record one use of a chain, given head first; see `Departures.touch`."""
        self.order.touch(keys, counted)
        if self.expiry.is_used:
            now = self._clock()
            for key in keys:
                if key in self.index.records:
                    self.expiry.used(key, now)

    # ---- leaving ----

    def remove(self, key: ObjectKey, *, force: bool = True) -> bool:
        """Take a readable object out of the index, with a DELETE event.

        With `force` false an object that somebody relies on stays. Returns whether it left.
        """
        record = self.get(key)
        if record is None or (record.is_held and not force):
            return False
        self._remove(record)
        return True

    def take_out(self, key: ObjectKey) -> None:
        """As `remove` by force, and what is being written here ends in nothing."""
        record = self.index.records.get(key)
        if record is not None and record.is_readable:
            self._remove(record)
        elif record is not None:
            self.index.drop_write(record)
            self._forget(record)

    def move_out(self, record: ObjectRecord) -> None:
        """Take out an object that a MOVE has brought elsewhere; the MOVE is its only event."""
        self._withdraw(record)

    def forget(self, key: ObjectKey) -> bool:
        """Take out an object whose file somebody else removed. Returns whether it was here."""
        record = self.index.get(key)
        if record is not None:
            record.is_gone = True
            self._remove(record)
        return record is not None

    def quarantine(self, record: ObjectRecord) -> bool:
        """Take out an object whose bytes are not what was stored; the next store rewrites it."""
        is_current = self.index.is_current(record)
        if is_current and record.is_readable:
            self._remove(record)
        record.state = ObjectState.QUARANTINED
        return is_current

    def evict_ahead(self, excess_bytes: int) -> int:
        """Choose files to delete before they are in the way; returns how many."""
        return self._evict(self.order.evict(excess_bytes, limit=_EVICTIONS_AT_ONCE) or [])

    def expire(self, now: float) -> int:
        """Take out what was not used for too long, tails before heads; returns how many."""
        self.order.end_keeping(now)
        due = self.expiry.take_due(now, _EVICTIONS_AT_ONCE)
        return sum(self._expire(key) for key in due)

    def clear(self) -> None:
        """Empty the tier; what is in motion ends in nothing."""
        self.generation += 1
        for record, _ in (entry for waiting in self._orphans.values() for entry in waiting):
            record.state = ObjectState.ABSENT  # its write has ended: nobody will commit it again
        self._orphans.clear()
        for key in list(self.index.records):
            self.take_out(key)

    # ---- inside ----

    def _refuse(self, spec: ObjectSpec) -> Refusal | None:
        if self.health is not TierHealth.OK:
            return Refusal.UNAVAILABLE
        if self.holds(spec):
            return Refusal.PRESENT
        if self.leaving.is_named(spec.key):
            return Refusal.LEAVING
        if self._room.size_bytes(spec) > self.levels.limit_bytes:
            return Refusal.TOO_LARGE
        parent_key = self._parent_key(spec)
        if parent_key is not None and not self._is_known(parent_key):
            return Refusal.NO_PARENT
        return None

    def _parent_key(self, item: ObjectSpec | ObjectRecord) -> ObjectKey | None:
        """Without which an object is worth nothing; None for the first, and outside of chains."""
        if item.parent_hash == CHAIN_ROOT or not self.groups[item.group].is_chain:
            return None
        return object_key(item.parent_hash, item.group)

    def _has_group_of(self, name: ObjectName) -> bool:
        return name.group < len(self.groups) and name.members == self.groups[name.group].members

    def _is_known(self, key: ObjectKey) -> bool:
        return key in self.index.records or any(tier.knows(key) for tier in self.neighbours)

    def _is_parent_coming(self, key: ObjectKey) -> bool:
        """Whether a child has to wait for its parent here: it is coming, and nowhere else yet."""
        parent = self.index.records.get(key)
        if parent is None or parent.state is not ObjectState.WRITING:
            return False
        return not any(tier.contains(key) for tier in self.neighbours)

    def _insert(self, fact: ObjectFact) -> KVCEvent:
        return Insert(fact, self.tier)

    def _record(self, spec: ObjectSpec, rows: tuple[int, ...]) -> ObjectRecord:
        return ObjectRecord(
            key=spec.key,
            group=spec.group,
            parent_hash=spec.parent_hash,
            run=spec.run,
            rows=rows,
            size_bytes=self._room.size_bytes(spec),
            state=ObjectState.WRITING,
            owner=spec.owner,
            is_passing=spec.is_passing,
        )

    def _publish(self, record: ObjectRecord, shared_blocks: int, announce: Announce) -> None:
        superseded = self.index.publish(record, keeps_tails=self.space.is_shared)
        # What was needed at the end of a shorter sequence is needed there still.
        record.is_passing = record.is_passing and all(old.is_passing for old in superseded)
        self.expiry.used(record.key, self._clock())
        self.order.settle(record)
        if record.is_passing:
            self.order.discourage([record.key])
        self._log.append(
            announce(ObjectFact(record.group, record.parent_hash, record.run, shared_blocks))
        )
        for shorter in superseded:
            self._remove(shorter)

    def _expire(self, key: ObjectKey) -> bool:
        record = self.index.get(key)
        if record is None or not self.order.may_leave(record):
            return False
        self._remove(record)
        return True

    def _evict(self, victims: Sequence[ObjectRecord]) -> int:
        for record in victims:
            self._remove(record, is_evicted=True)
        self.eviction_count += len(victims)
        return len(victims)

    def _remove(self, record: ObjectRecord, *, is_evicted: bool = False) -> None:
        shared_blocks = self._withdraw(record, is_evicted=is_evicted)
        fact = ObjectFact(record.group, record.parent_hash, record.run, shared_blocks)
        self._log.append(Delete(fact, self.tier))

    def _withdraw(self, record: ObjectRecord, *, is_evicted: bool = False) -> int:
        shared_blocks = self.index.withdraw(record)
        self._forget(record, is_evicted=is_evicted)
        return shared_blocks

    def _forget(self, record: ObjectRecord, *, is_evicted: bool = False) -> None:
        self.expiry.left(record.key)
        if not is_evicted:  # else it has left the order already
            self.order.leave(record)
        self.leaving.depart(record)
