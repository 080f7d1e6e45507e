"""The books of one tier: index, sizes, leases, order of eviction.

Only a leaf can be evicted: an object whose next chunk is in the tier is pinned in the policy, so
the tail of a prefix always leaves before its head, whatever the policy.
"""

from collections.abc import Sequence
from enum import StrEnum

from opal_connector.events import Delete, EventLog, Insert, ObjectFact
from opal_connector.eviction import EvictionPolicy
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.managers.records import (
    ObjectKey,
    ObjectRecord,
    ObjectSpec,
    ObjectState,
    object_key,
)
from opal_connector.managers.siblings import SiblingIndex
from opal_connector.managers.tier_pool import TierPool

_Insert = tuple[ObjectRecord, tuple[int, ...], str | None]


class Refusal(StrEnum):
    """Why a tier does not take an object. The value is a metric label."""

    PRESENT = "present"  # it, or a longer one that begins with it, is there or being written
    NO_PARENT = "no_parent"  # nothing could ever reach it
    FULL = "full"  # everything that could leave is in use
    TOO_LARGE = "too_large"


class OpalStorageBackend:
    """One tier's index over objects, without their bytes.

    Mutable state: `_records` (what a lookup may find or is being written), `_doomed` (removed,
    but its rows are still in use), `_orphans`, `_children` (stored children per parent key), the
    policy, the pool and the counters; guarded by the lock of the manager that owns the tier.
    """

    def __init__(
        self,
        *,
        tier: str,
        pool: TierPool,
        policy: EvictionPolicy,
        log: EventLog,
        eviction_threshold: float = 1.0,
    ) -> None:
        self.tier = tier
        self.pool = pool
        self.generation = 0
        self.eviction_count = 0
        self._limit_rows = int(pool.capacity_rows * eviction_threshold)
        self._policy = policy
        self._log = log
        self._records: dict[ObjectKey, ObjectRecord] = {}
        self._doomed: dict[int, ObjectRecord] = {}
        self._children: dict[ObjectKey, int] = {}
        self._ready = SiblingIndex()
        self._writing = SiblingIndex()
        # Written, and waiting for their parent to be: parent key -> what `commit` was given.
        self._orphans: dict[ObjectKey, list[_Insert]] = {}

    def __repr__(self) -> str:
        return (
            f"<OpalStorageBackend {self.tier}: {len(self._records)} objects, "
            f"{self.used_bytes}/{self.capacity_bytes} bytes, {len(self._doomed)} leaving>"
        )

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        """Bytes of all rows that are not free."""
        return self.pool.used_rows * self.pool.row_bytes

    @property
    def capacity_bytes(self) -> int:
        """The limit for `used_bytes`."""
        return self.pool.capacity_rows * self.pool.row_bytes

    # ---- reading ----

    def get(self, key: ObjectKey) -> ObjectRecord | None:
        """The readable object of that key."""
        record = self._records.get(key)
        return record if record is not None and record.is_readable else None

    def contains(self, key: ObjectKey) -> bool:
        """Whether a load of `key` could be planned now."""
        return self.get(key) is not None

    def batched_contains(self, keys: Sequence[ObjectKey]) -> int:
        """How many keys from the first on are readable without a gap."""
        for count, key in enumerate(keys):
            if not self.contains(key):
                return count
        return len(keys)

    def readable_keys(self) -> list[ObjectKey]:
        """The readable objects."""
        return [key for key, record in self._records.items() if record.is_readable]

    def longest_run(self, wanted: bytes, group: int) -> tuple[ObjectRecord | None, int]:
        """The readable object that shares most blocks with `wanted`, and how many."""
        run, blocks = self._ready.longest(wanted, group)
        if not blocks:
            return None, 0
        return self._records[object_key(run[-HASH_BYTES:], group)], blocks

    def longest_write(self, wanted: bytes, group: int) -> int:
        """Blocks of `wanted` that an object being written now will bring."""
        return self._writing.longest(wanted, group)[1]

    def holds(self, spec: ObjectSpec) -> bool:
        """Whether storing `spec` would bring nothing: it is here or coming, or a longer one is."""
        if spec.key in self._records:
            return True
        return self._ready.longest(spec.run, spec.group)[1] == spec.block_count

    # ---- storing ----

    def reserve(self, spec: ObjectSpec) -> ObjectRecord | Refusal:
        """Make room for an object and enter it as WRITING.

        Evicts only what is missing. The parent cannot leave while its child is here or coming.
        """
        refusal = self._refuse(spec)
        if refusal is not None:
            return refusal
        key = spec.key
        self._adopt(spec.parent_hash, spec.group)
        rows = self._make_room(spec.block_count)
        if rows is None:
            self._abandon(spec.parent_hash, spec.group)
            return Refusal.FULL
        record = ObjectRecord(
            key=key,
            group=spec.group,
            parent_hash=spec.parent_hash,
            run=spec.run,
            rows=rows,
            size_bytes=len(rows) * self.pool.row_bytes,
            state=ObjectState.WRITING,
        )
        self._records[key] = record
        self._policy.insert(key)
        self._policy.pin(key)
        self._writing.add(spec.run, spec.group)
        return record

    def commit(
        self,
        record: ObjectRecord,
        *,
        stored: bool,
        token_ids: tuple[int, ...] = (),
        lora_name: str | None = None,
    ) -> bool:
        """End a write: READY and an INSERT event, or as if it had never been planned.

        A parent is announced before its child: a child that is written first becomes READY with
        its parent, or is dropped with it.

        Returns:
            Whether the object is there now or will be with its parent. Not so when the write
            failed, when the tier was reset meanwhile, when a longer object that begins with it
            came first, or when its parent is gone.
        """
        if self._records.get(record.key) is not record:
            record.state = ObjectState.ABSENT
            self._release_doomed(record)
            return False
        if stored and record.parent_hash != CHAIN_ROOT:
            parent_key = object_key(record.parent_hash, record.group)
            parent = self._records.get(parent_key)
            if parent is not None and parent.state is ObjectState.WRITING:
                insert = (record, token_ids, lora_name)
                self._orphans.setdefault(parent_key, []).append(insert)
                return True
            stored = parent is not None
        self._writing.discard(record.run, record.group)
        shared_blocks = self._ready.longest(record.run, record.group)[1]
        is_new = shared_blocks * HASH_BYTES < len(record.run)
        if stored and is_new:
            self._publish(record, shared_blocks, token_ids, lora_name)
        else:
            record.state = ObjectState.ABSENT
            self._forget(record)
        for child, child_tokens, child_lora in self._orphans.pop(record.key, ()):
            self.commit(child, stored=stored, token_ids=child_tokens, lora_name=child_lora)
        return stored and is_new

    def _publish(
        self,
        record: ObjectRecord,
        shared_blocks: int,
        token_ids: tuple[int, ...],
        lora_name: str | None,
    ) -> None:
        record.state = ObjectState.READY
        self._ready.add(record.run, record.group)
        self._settle(record)
        fact = ObjectFact(record.group, record.parent_hash, record.run, shared_blocks)
        self._log.append(Insert(fact, self.tier, token_ids, lora_name))
        for shorter in self._ready.prefixes(record.run, record.group):
            self._remove(self._records[object_key(shorter[-HASH_BYTES:], record.group)])

    # ---- promises ----

    def pin(self, record: ObjectRecord, *, loading: bool = False) -> None:
        """Promise the rows of a readable object to somebody, until `unpin`."""
        record.leases += 1
        if loading:
            record.loads += 1
            record.state = ObjectState.LOADING
        if record.leases == 1 and self._records.get(record.key) is record:
            self._policy.pin(record.key)

    def unpin(self, record: ObjectRecord, *, loading: bool = False) -> None:
        """End one promise. Rows of an object that was removed meanwhile become free."""
        assert record.leases > 0, "unpinned more often than pinned"
        record.leases -= 1
        if loading:
            record.loads -= 1
            if not record.loads and record.state is ObjectState.LOADING:
                record.state = ObjectState.READY
        if self._records.get(record.key) is record:
            self._settle(record)
        else:
            self._release_doomed(record)

    def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Record one use of a chain, given head first.

        The tail is touched first, so that the head counts as used last.
        """
        for key in reversed(keys):
            if key in self._records:
                self._policy.touch(key)

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

    def quarantine(self, record: ObjectRecord) -> bool:
        """Take out an object whose bytes are not what was stored; the next store rewrites it."""
        is_current = self._records.get(record.key) is record
        if is_current and record.is_readable:
            self._remove(record)
        record.state = ObjectState.QUARANTINED
        return is_current

    def clear(self) -> None:
        """Empty the tier; what is in motion ends in nothing."""
        self.generation += 1
        for record, _, _ in (insert for waiting in self._orphans.values() for insert in waiting):
            record.state = ObjectState.ABSENT  # its write has ended: nobody will commit it again
        self._orphans.clear()
        for record in list(self._records.values()):
            if record.is_readable:
                self._remove(record)
            else:
                self._writing.discard(record.run, record.group)
                self._forget(record)

    # ---- inside ----

    def _refuse(self, spec: ObjectSpec) -> Refusal | None:
        if self.holds(spec):
            return Refusal.PRESENT
        if spec.block_count > self._limit_rows:
            return Refusal.TOO_LARGE
        parent = object_key(spec.parent_hash, spec.group)
        if spec.parent_hash != CHAIN_ROOT and parent not in self._records:
            return Refusal.NO_PARENT
        return None

    def _make_room(self, rows_needed: int) -> tuple[int, ...] | None:
        """Rows for a new object, by evicting no more than is missing; None evicts nothing."""
        victims: list[ObjectRecord] = []
        missing = self.pool.used_rows + rows_needed - self._limit_rows
        while missing > 0:
            chosen = self._policy.evict(1)
            if chosen is None:
                self._policy.restore([record.key for record in victims])
                for record in victims:
                    self._adopt(record.parent_hash, record.group)
                return None
            record = self._records[chosen[0]]
            self._abandon(record.parent_hash, record.group)  # the parent may be the next
            missing -= len(record.rows)
            victims.append(record)
        for record in victims:
            self._remove(record, is_evicted=True)
        self.eviction_count += len(victims)
        return self.pool.allocate(rows_needed)

    def _adopt(self, parent_hash: bytes, group: int) -> None:
        if parent_hash == CHAIN_ROOT:
            return
        parent = object_key(parent_hash, group)
        self._children[parent] = self._children.get(parent, 0) + 1
        if parent in self._records:
            self._policy.pin(parent)

    def _abandon(self, parent_hash: bytes, group: int) -> None:
        if parent_hash == CHAIN_ROOT:
            return
        parent = object_key(parent_hash, group)
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            record = self._records.get(parent)
            if record is not None:
                self._settle(record)

    def _settle(self, record: ObjectRecord) -> None:
        """Make an indexed object evictable if nothing keeps it."""
        if not record.is_held and record.key not in self._children:
            self._policy.unpin(record.key)

    def _remove(self, record: ObjectRecord, *, is_evicted: bool = False) -> None:
        self._ready.discard(record.run, record.group)
        shared_blocks = self._ready.longest(record.run, record.group)[1]
        self._forget(record, is_evicted=is_evicted)
        fact = ObjectFact(record.group, record.parent_hash, record.run, shared_blocks)
        self._log.append(Delete(fact, self.tier))

    def _forget(self, record: ObjectRecord, *, is_evicted: bool = False) -> None:
        del self._records[record.key]
        if not is_evicted:  # else it has left the policy and its parent already
            self._policy.remove(record.key)
            self._abandon(record.parent_hash, record.group)
        if record.is_held:
            self._doomed[id(record)] = record
        else:
            self._free(record)

    def _release_doomed(self, record: ObjectRecord) -> None:
        if not record.is_held and self._doomed.pop(id(record), None) is not None:
            self._free(record)

    def _free(self, record: ObjectRecord) -> None:
        record.state = ObjectState.ABSENT
        self.pool.free(record.rows)

    def check(self) -> None:
        """Recompute every book from the records and compare.

        Raises:
            AssertionError: They differ.
        """
        self.pool.check()
        self._policy.check()
        everything = [*self._records.values(), *self._doomed.values()]
        rows = [row for record in everything for row in record.rows]
        assert len(rows) == len(set(rows)) == self.pool.used_rows, "rows held twice or lost"
        assert sum(record.size_bytes for record in everything) == self.used_bytes
        assert self.used_bytes <= self.capacity_bytes
        assert len(self._policy) == len(self._records)
        children: dict[ObjectKey, int] = {}
        for key, record in self._records.items():
            assert key == record.key == object_key(record.run[-HASH_BYTES:], record.group)
            if record.parent_hash != CHAIN_ROOT:
                parent = object_key(record.parent_hash, record.group)
                children[parent] = children.get(parent, 0) + 1
            assert record.loads <= record.leases
            assert (record.state is ObjectState.LOADING) == (record.loads > 0)
        assert children == self._children, "children are counted wrong"
        readable = sum(record.is_readable for record in self._records.values())
        assert len(self._ready) == readable, "the sibling index differs from the records"
        assert all(record.is_held for record in self._doomed.values())

    def check_leases(self, expected: dict[int, int]) -> None:
        """Compare every lease count with `expected`, counted by record identity."""
        for record in (*self._records.values(), *self._doomed.values()):
            assert record.leases == expected.get(id(record), 0), f"leases of {record} differ"
