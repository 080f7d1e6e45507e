"""Books for hosts whose objects are single, of any size, and named by somebody else."""

import pytest
from fakes import ROW_BYTES, stamp

from opal_connector.config import OpalConfig
from opal_connector.events import EventLog, Insert
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import plain_layout
from opal_connector.managers import (
    NoPrefixCache,
    ObjectGroup,
    ObjectRecord,
    ObjectSpec,
    OpalStorageBackend,
    TierPool,
    build_storage,
)
from opal_connector.managers.audit import audit_tier
from opal_connector.managers.counters import BookCounters
from opal_connector.managers.jobs import JobKind, JobTable, PlannedObject
from opal_connector.managers.placement import Placement
from opal_connector.managers.settlement import Settlement
from opal_connector.managers.watermarks import TierLimits
from opal_connector.transfers import FailureKind, JobResult, ObjectName

GROUPS = [ObjectGroup(max(1, rows), is_chain=False) for rows in range(9)]


def tier(rows: int, quotas: dict[str, float] | None = None) -> OpalStorageBackend:
    """A tier in which the group of an object is its number of rows."""
    return OpalStorageBackend(
        tier="CPUMemory",
        space=TierPool(capacity_rows=rows, row_bytes=ROW_BYTES),
        policy=LRUPolicy(),
        log=EventLog(enabled=True),
        limits=TierLimits(quotas=quotas or {}),
        groups=GROUPS,
    )


def spec(number: int, *, rows: int, owner: str = "") -> ObjectSpec:
    """An object of one block, with something else where a chain has its parent."""
    return ObjectSpec(rows, stamp(1000 + number), stamp(number), 0, owner)


def put(books: OpalStorageBackend, number: int, *, rows: int, owner: str = "") -> ObjectRecord:
    """Store an object at once."""
    record = books.reserve(spec(number, rows=rows, owner=owner))
    assert isinstance(record, ObjectRecord), record
    assert books.commit(record, stored=True)
    audit_tier(books)
    return record


def test_an_object_takes_the_rows_of_its_group() -> None:
    """Large and small ones share the pool, and room goes from one size to another."""
    books = tier(8)
    small = [put(books, number, rows=1) for number in range(5)]
    large = put(books, 10, rows=6)

    assert len(large.rows) == 6
    assert books.used_bytes == 8 * ROW_BYTES
    assert [books.contains(record.key) for record in small] == [False, False, False, True, True]


def test_what_is_taken_out_while_it_is_written_does_not_come_back() -> None:
    """The end of its write changes nothing, and nobody hears of it."""
    books = tier(4)
    record = books.reserve(spec(1, rows=3))
    assert isinstance(record, ObjectRecord)

    books.take_out(record.key)
    assert not books.knows(record.key)
    assert books.used_bytes == 3 * ROW_BYTES, "its rows are still being written"
    assert books.commit(record, stored=True) is False

    assert (books.used_bytes, len(books), len(books._log)) == (0, 0, 0)
    audit_tier(books)


def test_taking_out_what_is_readable_is_a_deletion() -> None:
    """Also while somebody relies on it: its rows stay until then."""
    books = tier(4)
    record = put(books, 1, rows=2)
    books.pin(record)

    books.take_out(record.key)
    books.take_out(record.key)

    assert not books.contains(record.key)
    assert books.used_bytes == 2 * ROW_BYTES
    books.unpin(record)
    assert books.used_bytes == 0


def test_what_was_there_before_can_have_an_owner() -> None:
    """It counts for his quota: he pays with it, and not with what is others'."""
    books = tier(8, quotas={"greedy": 0.5})
    put(books, 1, rows=4)
    for number in (2, 3):
        name = ObjectName(2, stamp(1000 + number), stamp(number), 2)
        assert books.adopt(name, "greedy")
    mine = put(books, 4, rows=2, owner="greedy")

    assert books.contains(mine.key)
    assert books.contains(spec(1, rows=4).key)
    assert not books.contains(spec(2, rows=2).key)


@pytest.mark.parametrize("failure", [None, FailureKind.IO])
def test_jobs_of_no_request_are_settled(failure: FailureKind | None) -> None:
    """A host without requests stores and loads: what became of it is in the books all the same."""
    log = EventLog(enabled=True)
    pool = TierPool(capacity_rows=4, row_bytes=ROW_BYTES)
    storage, rules = build_storage(OpalConfig(), groups=GROUPS, spaces={"CPUMemory": pool}, log=log)
    counters, jobs = BookCounters(), JobTable(ranks=1)
    placement = Placement(storage, rules, counters)
    settlement = Settlement(storage, placement, counters, NoPrefixCache((), plain_layout(1)))
    outcome = storage.reserve(spec(1, rows=2))
    assert isinstance(outcome, tuple)
    failed = {} if failure is None else {0: failure}

    for kind in (JobKind.STORE, JobKind.LOAD):
        item = PlannedObject(tier=0, record=outcome[1])
        job = jobs.get(jobs.open(kind, None, [item]))
        assert job is not None
        if kind is JobKind.LOAD:
            storage.tiers[0].pin(item.record, loading=True)
        assert job.answer(JobResult(job.job_id, 0, failed if kind is JobKind.STORE else {}))
        settlement.settle(job)
        audit_tier(storage.tiers[0])
        if failure is not None:
            break

    assert storage.tiers[0].contains(outcome[1].key) is (failure is None)
    assert [type(event) for event in log.take()] == ([Insert] if failure is None else [])
    assert counters.failures == ({} if failure is None else {"io": 1})
