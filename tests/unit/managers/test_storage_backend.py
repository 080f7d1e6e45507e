"""The books of one tier: what may enter, what may leave, and that an auditor would notice."""

from collections.abc import Sequence

import pytest
from fakes import ROW_BYTES, stamp

from opal_connector.events import Delete, EventLog, Insert, KVCEvent
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import (
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    ObjectState,
    OpalStorageBackend,
    Refusal,
    TierPool,
)
from opal_connector.managers.audit import audit_leases, audit_tier
from opal_connector.managers.watermarks import TierLimits

LOG = EventLog(enabled=True)


@pytest.fixture(autouse=True)
def log() -> EventLog:
    LOG.take()
    return LOG


def tier(rows: int, eviction_threshold: float = 1.0, groups: int = 1) -> OpalStorageBackend:
    return OpalStorageBackend(
        tier="CPUMemory",
        space=TierPool(capacity_rows=rows, row_bytes=ROW_BYTES),
        policy=LRUPolicy(),
        log=LOG,
        limits=TierLimits(threshold=eviction_threshold),
        groups=[ObjectGroup()] * groups,
    )


def spec(names: Sequence[int], parent: int | None = None, group: int = 0) -> ObjectSpec:
    """An object of the blocks `names`, behind the block `parent`."""
    return ObjectSpec(
        group=group,
        parent_hash=CHAIN_ROOT if parent is None else stamp(parent),
        run=b"".join(stamp(name) for name in names),
        first_block=0,
    )


def put(books: OpalStorageBackend, names: Sequence[int], parent: int | None = None) -> ObjectRecord:
    """Store an object at once."""
    record = books.reserve(spec(names, parent))
    assert isinstance(record, ObjectRecord), record
    assert books.commit(record, stored=True)
    audit_tier(books)
    return record


def deleted(events: Sequence[KVCEvent]) -> list[bytes]:
    return [event.fact.chunk_hash for event in events if isinstance(event, Delete)]


# Entering.


def test_object_is_readable_after_its_commit_and_not_before() -> None:
    """HT-10: ABSENT, WRITING, READY; only the last can be read, and only it has an event."""
    books = tier(4)
    record = books.reserve(spec([1, 2]))
    assert isinstance(record, ObjectRecord)
    assert record.state is ObjectState.WRITING
    assert not books.contains(record.key)
    assert books.longest_run(record.run, 0) == (None, 0)
    assert books.index.longest_write(record.run, 0) == 2
    assert len(LOG) == 0

    books.commit(record, stored=True, announce=lambda fact: Insert(fact, books.tier, (7, 8), "sql"))

    assert record.state is ObjectState.READY
    assert books.contains(record.key)
    assert books.index.longest_write(record.run, 0) == 0
    (event,) = LOG.take()
    assert isinstance(event, Insert)
    assert (event.tier, event.token_ids, event.lora_name) == ("CPUMemory", (7, 8), "sql")
    assert (event.fact.block_hashes, event.fact.parent_hash) == (record.run, CHAIN_ROOT)


def test_failed_write_leaves_no_trace() -> None:
    """As if it had never been planned: no event, no rows, no name that counts as present."""
    books = tier(4)
    record = books.reserve(spec([1, 2]))
    assert isinstance(record, ObjectRecord)

    assert books.commit(record, stored=False) is False

    assert record.state is ObjectState.ABSENT
    assert (len(books), books.used_bytes, len(LOG)) == (0, 0, 0)
    assert isinstance(books.reserve(spec([1, 2])), ObjectRecord)
    audit_tier(books)


@pytest.mark.parametrize("is_committed", [False, True])
def test_present_is_refused(is_committed: bool) -> None:
    """One write per key at a time, and none for what is there."""
    books = tier(8)
    record = books.reserve(spec([1, 2]))
    assert isinstance(record, ObjectRecord)
    if is_committed:
        books.commit(record, stored=True)

    assert books.reserve(spec([1, 2])) is Refusal.PRESENT
    audit_tier(books)


def test_beginning_of_a_present_object_is_present() -> None:
    """A shorter tail brings nothing that the longer object does not hold."""
    books = tier(8)
    put(books, [1, 2, 3])

    assert books.reserve(spec([1, 2])) is Refusal.PRESENT
    assert isinstance(books.reserve(spec([1, 2, 4])), ObjectRecord)


def test_object_larger_than_the_tier_is_refused() -> None:
    """Nothing is evicted for what can never fit."""
    books = tier(3)
    put(books, [1])

    assert books.reserve(spec([2, 3, 4, 5])) is Refusal.TOO_LARGE
    assert len(books) == 1


def test_child_without_its_parent_is_refused() -> None:
    """A chunk behind a hole could never be reached; behind a parent being written it can."""
    books = tier(8)

    assert books.reserve(spec([3, 4], parent=2)) is Refusal.NO_PARENT
    assert isinstance(books.reserve(spec([1, 2])), ObjectRecord)
    assert isinstance(books.reserve(spec([3, 4], parent=2)), ObjectRecord)
    audit_tier(books)


def test_full_tier_of_things_in_use_refuses() -> None:
    """What is leased or being written does not leave for a store (HT-09)."""
    books = tier(4)
    first = put(books, [1, 2])
    books.pin(first)
    writing = books.reserve(spec([3, 4]))
    assert isinstance(writing, ObjectRecord)

    assert books.reserve(spec([5, 6])) is Refusal.FULL
    audit_tier(books)
    books.unpin(first)
    assert isinstance(books.reserve(spec([5, 6])), ObjectRecord)
    audit_tier(books)


def test_refused_store_evicts_nothing() -> None:
    """Room that cannot be made is not half made: what could have left stays."""
    books = tier(5)
    head = put(books, [1])
    tail = put(books, [2], parent=1)
    large = put(books, [3, 4, 5])
    books.pin(large)
    LOG.take()

    assert books.reserve(spec([6, 7, 8])) is Refusal.FULL
    assert books.contains(head.key)
    assert books.contains(tail.key)
    assert (len(LOG), books.eviction_count) == (0, 0)
    audit_tier(books)
    put(books, [6])
    assert deleted(LOG.take()) == [stamp(2)], "the tail is still before its head"


# Leaving.


def test_ht_57_only_the_shortfall_is_evicted() -> None:
    """Pool 10, free 8: for 10 blocks the two in the way leave, for 9 one of them."""
    books = tier(10)
    put(books, [1])
    put(books, [2])
    assert isinstance(books.reserve(spec(range(10, 20))), ObjectRecord)
    assert len(books) == 1

    books = tier(10)
    put(books, [1])
    put(books, [2])
    assert isinstance(books.reserve(spec(range(10, 19))), ObjectRecord)
    assert len(books) == 2
    assert books.eviction_count == 1


def test_tail_leaves_before_its_head() -> None:
    """The least recently used head of a longer prefix is no victim while its tail is there."""
    books = tier(6)
    head = put(books, [1, 2])
    middle = put(books, [3, 4], parent=2)
    tail = put(books, [5, 6], parent=4)
    LOG.take()
    books.touch([tail.key])
    for name in (10, 20, 30):
        put(books, [name, name + 1])

    assert deleted(LOG.take()) == [record.run[-32:] for record in (tail, middle, head)]


def test_parent_of_what_is_being_written_stays() -> None:
    """The child's write must find its parent when it ends."""
    books = tier(4)
    head = put(books, [1, 2])
    assert isinstance(books.reserve(spec([3, 4], parent=2)), ObjectRecord)

    assert books.reserve(spec([5, 6])) is Refusal.FULL
    assert books.contains(head.key)


def test_eviction_starts_at_the_threshold() -> None:
    """A tenth of the tier stays free where 0.9 is the threshold."""
    books = tier(10, eviction_threshold=0.9)
    for name in range(10, 20):
        put(books, [name])

    assert books.used_bytes == 9 * ROW_BYTES
    assert books.capacity_bytes == 10 * ROW_BYTES
    assert books.reserve(spec(range(100, 110))) is Refusal.TOO_LARGE


def test_touched_chain_stays_longest_in_its_order() -> None:
    """One use of a chain: its head counts as used last."""
    books = tier(4)
    records = [put(books, [name]) for name in (1, 2, 3, 4)]
    LOG.take()
    books.touch([records[0].key, records[1].key])
    for name in (11, 12, 13, 14):
        put(books, [name])

    assert deleted(LOG.take()) == [stamp(3), stamp(4), stamp(2), stamp(1)]


@pytest.mark.parametrize("force", [True, False])
def test_removed_object_is_gone_with_an_event(force: bool) -> None:
    """A free object leaves at once, its rows with it."""
    books = tier(4)
    record = put(books, [1, 2])
    LOG.take()

    assert books.remove(record.key, force=force) is True
    assert deleted(LOG.take()) == [stamp(2)]
    assert books.used_bytes == 0
    assert books.remove(record.key) is False


def test_leased_object_leaves_only_by_force_and_keeps_its_rows() -> None:
    """Removed from the index at once; its bytes stay until the last lease ends (HT-55)."""
    books = tier(4)
    record = put(books, [1, 2])
    books.pin(record)

    assert books.remove(record.key, force=False) is False
    assert books.remove(record.key) is True
    assert not books.contains(record.key)
    assert books.used_bytes == 2 * ROW_BYTES
    audit_tier(books)
    replacement = put(books, [1, 2])
    assert set(replacement.rows).isdisjoint(record.rows)
    books.unpin(record)
    assert books.used_bytes == 2 * ROW_BYTES
    assert books.contains(replacement.key)
    audit_tier(books)


def test_quarantined_object_is_written_anew_by_the_next_store() -> None:
    """HT-13: DELETE at once, rows kept while a load still reads, no dedup against the bad one."""
    books = tier(4)
    record = put(books, [1, 2])
    LOG.take()
    books.pin(record, loading=True)

    assert books.quarantine(record) is True

    assert record.state is ObjectState.QUARANTINED
    assert deleted(LOG.take()) == [stamp(2)]
    assert isinstance(books.reserve(spec([1, 2])), ObjectRecord)
    books.unpin(record, loading=True)
    audit_tier(books)
    assert books.quarantine(record) is False
    assert len(LOG) == 0


def test_clear_ends_what_is_in_motion_in_nothing() -> None:
    """READY leaves with an event, WRITING without one; neither comes back, rows return late."""
    books = tier(8)
    ready = put(books, [1, 2])
    leased = put(books, [3, 4])
    books.pin(leased)
    writing = books.reserve(spec([5, 6]))
    assert isinstance(writing, ObjectRecord)
    LOG.take()
    before = books.generation

    books.clear()

    assert books.generation == before + 1
    assert set(deleted(LOG.take())) == {stamp(2), stamp(4)}
    assert books.index.readable_keys() == []
    assert books.used_bytes == 4 * ROW_BYTES
    audit_tier(books)
    assert books.commit(writing, stored=True) is False
    books.unpin(leased)
    assert (books.used_bytes, len(books), len(LOG)) == (0, 0, 0)
    assert ready.state is ObjectState.ABSENT
    audit_tier(books)


def test_nobody_waits_for_a_write_that_was_cleared() -> None:
    """A store that cannot come back is not "coming"; a new store of the same blocks is."""
    books = tier(8)
    old = books.reserve(spec([1, 2]))
    assert isinstance(old, ObjectRecord)
    books.clear()
    assert books.index.longest_write(spec([1, 2]).run, 0) == 0

    new = books.reserve(spec([1, 2]))
    assert isinstance(new, ObjectRecord)
    books.commit(old, stored=True)
    assert books.index.longest_write(spec([1, 2]).run, 0) == 2
    assert books.commit(new, stored=True) is True
    assert books.index.longest_write(spec([1, 2]).run, 0) == 0
    audit_tier(books)


# Objects that share blocks.


def test_longer_object_supersedes_the_shorter_one() -> None:
    """INSERT of the longer with the shared blocks named, then DELETE of the shorter, all shared."""
    books = tier(8)
    put(books, [1, 2])
    LOG.take()

    longer = put(books, [1, 2, 3])

    insert, delete = LOG.take()
    assert isinstance(insert, Insert)
    assert isinstance(delete, Delete)
    assert (insert.fact.chunk_hash, insert.fact.shared_blocks) == (stamp(3), 2)
    assert (delete.fact.chunk_hash, delete.fact.shared_blocks) == (stamp(2), 2)
    assert books.index.readable_keys() == [longer.key]
    assert books.used_bytes == 3 * ROW_BYTES


def test_shorter_object_that_ends_late_is_dropped() -> None:
    """Both were being written; the longer one came first: the shorter brings nothing."""
    books = tier(8)
    shorter, longer = books.reserve(spec([1, 2])), books.reserve(spec([1, 2, 3]))
    assert isinstance(shorter, ObjectRecord)
    assert isinstance(longer, ObjectRecord)
    assert books.commit(longer, stored=True) is True

    assert books.commit(shorter, stored=True) is False
    assert [event.fact.chunk_hash for event in LOG.take()] == [stamp(3)]
    assert books.used_bytes == 3 * ROW_BYTES
    audit_tier(books)


def test_leased_shorter_object_keeps_its_rows_until_its_lease_ends() -> None:
    """Superseded is not overwritten."""
    books = tier(8)
    shorter = put(books, [1, 2])
    books.pin(shorter)
    longer = put(books, [1, 2, 3])

    assert set(longer.rows).isdisjoint(shorter.rows)
    assert books.used_bytes == 5 * ROW_BYTES
    books.unpin(shorter)
    assert books.used_bytes == 3 * ROW_BYTES
    audit_tier(books)


def test_siblings_name_what_they_share() -> None:
    """Two chunks that part inside: the second's event says how much of it was there already."""
    books = tier(8)
    first, second = put(books, [1, 2, 3]), put(books, [1, 2, 4])
    assert [event.fact.shared_blocks for event in LOG.take()] == [0, 2]

    books.remove(first.key)
    books.remove(second.key)
    assert [event.fact.shared_blocks for event in LOG.take()] == [2, 0]


# Reading.


def test_contains_counts_without_a_gap() -> None:
    """Keys from the first on, up to the first that cannot be loaded."""
    books = tier(8)
    records = [put(books, [name]) for name in (1, 2, 3)]
    keys = [record.key for record in records]

    assert books.batched_contains(keys) == 3
    books.remove(keys[1])
    assert books.batched_contains(keys) == 1
    assert books.batched_contains([]) == 0


def test_groups_are_separate() -> None:
    """The same blocks of two kv groups are two objects."""
    books = tier(8, groups=2)
    one = books.reserve(spec([1, 2]))
    other = books.reserve(spec([1, 2], group=1))
    assert isinstance(one, ObjectRecord)
    assert isinstance(other, ObjectRecord)
    books.commit(one, stored=True)

    assert one.key != other.key
    assert books.longest_run(one.run, 0)[1] == 2
    assert books.longest_run(one.run, 1)[1] == 0
    audit_tier(books)


# The auditor.


def test_state_follows_the_loads() -> None:
    """LOADING from the first load to the last."""
    books = tier(4)
    record = put(books, [1, 2])
    books.pin(record, loading=True)
    books.pin(record, loading=True)
    books.unpin(record, loading=True)
    assert record.state is ObjectState.LOADING
    audit_tier(books)
    books.unpin(record, loading=True)
    assert record.state is ObjectState.READY
    with pytest.raises(AssertionError, match="more often"):
        books.unpin(record)


@pytest.mark.parametrize(
    "damage",
    [
        lambda books, record: books.space.allocate(1),
        lambda books, record: books.space.free(record.rows, record.size_bytes),
        lambda books, record: books.order._lineage.counts.clear(),
        lambda books, record: books.index._ready.clear(),
        lambda books, record: books.order._policies[""].remove(record.key),
        lambda books, record: setattr(record, "rows", record.rows[:1]),
        lambda books, record: setattr(record, "size_bytes", 1),
        lambda books, record: setattr(record, "state", ObjectState.LOADING),
        lambda books, record: setattr(record, "loads", 1),
    ],
)
def test_auditor_finds_every_kind_of_damage(damage: object) -> None:
    """check() recomputes each book; none of them may be wrong unnoticed."""
    books = tier(8)
    put(books, [1, 2])
    child = put(books, [3, 4], parent=2)
    audit_tier(books)

    damage(books, child)  # type: ignore[operator]

    with pytest.raises(AssertionError):
        audit_tier(books)


def test_auditor_compares_leases() -> None:
    """A lease that nobody holds, or one too few, is reported."""
    books = tier(4)
    record = put(books, [1, 2])
    books.pin(record)

    audit_leases(books, {id(record): 1})
    for wrong in ({}, {id(record): 2}):
        with pytest.raises(AssertionError, match="leases"):
            audit_leases(books, wrong)
