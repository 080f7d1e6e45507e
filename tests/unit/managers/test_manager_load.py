"""Loads: which rows fill which blocks, and what a failure costs."""

import numpy as np
import pytest
from fakes import (
    BLOCK_TOKENS,
    ROW_BYTES,
    content,
    done,
    hit_blocks,
    make_manager,
    plan,
    plan_load,
    replay,
    start,
    store,
)

from opal_connector.events import Delete
from opal_connector.managers import LookupState, OpalKVCacheManager, OpalRequest
from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows, execute_job
from opal_connector.transfers import FailureKind, JobResult, LoadJob

UNTOUCHED = 0xA5


def load(
    manager: OpalKVCacheManager, request: OpalRequest, *, computed: int, blocks: int
) -> LoadJob:
    """Look up, then plan a load of `blocks` blocks into blocks numbered from 100."""
    manager.lookup(request, computed_blocks=computed, max_blocks=len(request.chain.hashes), now=0)
    return plan_load(manager, request, range(100, 100 + blocks), computed)


class Host:
    """One rank's bytes beside the books: a memory tier and paged blocks.

    Mutable state: the rows of the tier and the paged blocks.
    """

    def __init__(self, manager: OpalKVCacheManager, rows: int) -> None:
        self.manager = manager
        self.memory = CPUMemory(allocate_host_rows(row_count=rows, row_bytes=ROW_BYTES))
        self.paged = ArrayBlocks(np.full((64, ROW_BYTES), UNTOUCHED, dtype=np.uint8))

    def store(self, blocks: list[int], request_id: str = "w") -> OpalRequest:
        """Store a sequence whose block i lies in paged block i."""
        request = start(self.manager, blocks, request_id)
        for place, block_hash in enumerate(request.chain.hashes):
            self.paged.blocks[place] = content(block_hash)
        job = plan(self.manager, request)
        if job is not None:
            self.manager.commit(execute_job(job, tiers=[self.memory], paged=self.paged))
        self.manager.end_request(request)
        return request

    def load(self, blocks: list[int], computed: int = 0) -> JobResult:
        """Load what a lookup finds, behind the computed blocks, into their places."""
        self.paged.blocks[:] = UNTOUCHED
        request = start(self.manager, blocks, "l")
        result = self.manager.lookup(
            request, computed_blocks=computed, max_blocks=len(blocks), now=0
        )
        assert result.state is LookupState.HIT
        job = plan_load(
            self.manager, request, range(computed, computed + result.block_count), computed
        )
        outcome = execute_job(job, tiers=[self.memory], paged=self.paged)
        self.manager.commit(outcome)
        self.manager.end_request(request)
        self.manager.check()
        return outcome

    def expect(self, request: OpalRequest, blocks: range) -> None:
        """Exactly these blocks of the sequence are in their paged blocks."""
        for place in range(len(self.paged.blocks)):
            block = self.paged.blocks[place]
            if place in blocks:
                assert np.array_equal(block, content(request.chain.hashes[place])), place
            else:
                assert np.all(block == UNTOUCHED), place


# Which rows, which blocks.


@pytest.mark.parametrize("computed", range(8))
def test_ht_11_load_fills_only_blocks_behind_the_computed_ones(computed: int) -> None:
    """Chunks of four, a local hit that ends anywhere inside: no byte below it is written."""
    host = Host(make_manager(rows=32, chunk_blocks=4), 32)
    request = host.store(list(range(8)))

    host.load(list(range(8)), computed)

    host.expect(request, range(computed, 8))


@pytest.mark.parametrize("stored", [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 9]])
@pytest.mark.parametrize("computed", [3, 4, 5, 6])
def test_part_of_a_sibling_is_loaded(computed: int, stored: list[int]) -> None:
    """The common blocks of a chunk that goes on otherwise, or of a tail, from any block on."""
    host = Host(make_manager(rows=32, chunk_blocks=4), 32)
    host.store(stored)
    wanted = list(range(8))

    host.load(wanted, computed)

    host.expect(start(host.manager, wanted), range(computed, 7))


def test_job_covers_the_blocks_it_was_given_and_no_more() -> None:
    """HT-32: fewer blocks allocated than promised: the rest is not written anywhere."""
    manager = make_manager(rows=32, chunk_blocks=4)
    store(manager, range(8))

    job = load(manager, start(manager, range(8)), computed=0, blocks=6)

    assert [item.block_ids for item in job.objects] == [(100, 101, 102, 103), (104, 105)]
    assert [len(item.tier_rows) for item in job.objects] == [4, 2]
    assert [len(item.stamps) for item in job.objects] == [128, 64]
    assert job.missing_block_ids == ()
    manager.check()
    manager.commit(done(job))
    manager.check()


def test_blocks_beyond_the_promise_are_named_as_missing() -> None:
    """The host expects them filled: it is told at once which it must compute itself."""
    manager = make_manager(rows=32, chunk_blocks=4)
    store(manager, range(6))

    job = load(manager, start(manager, range(8)), computed=0, blocks=8)

    assert job.missing_block_ids == (106, 107)
    manager.commit(done(job))


def test_load_without_a_promise_is_all_missing() -> None:
    """A lease that ended before its load (deadline, reset) is a miss of every block."""
    manager = make_manager(rows=32)
    store(manager, range(4))
    request = start(manager, range(4))
    manager.lookup(request, computed_blocks=0, max_blocks=4, now=0)
    manager.expire(1e6)

    job = plan_load(manager, request, range(100, 104))

    assert (job.objects, job.missing_block_ids) == ((), (100, 101, 102, 103))
    assert manager.commit(done(job)) is not None
    assert manager.open_job_count == 0


def test_load_counts_as_a_use_and_the_tail_still_leaves_first() -> None:
    """What was loaded stays longest, and of it the head."""
    manager = make_manager(rows=6, chunk_blocks=1)
    store(manager, [0, 1, 2])
    store(manager, [7, 8, 9])
    manager.commit(done(load(manager, start(manager, [0, 1, 2]), computed=0, blocks=3)))
    manager.take_events()
    for block in (20, 21, 22, 23, 24):
        store(manager, [block])

    left = [event.fact.block_hashes for event in manager.take_events() if isinstance(event, Delete)]
    first, second = start(manager, [7, 8, 9], "x"), start(manager, [0, 1, 2], "y")
    assert left == [*reversed(first.chain.hashes), second.chain.hashes[2], second.chain.hashes[1]]


def test_ht_09_loaded_chunk_is_not_evicted_before_the_answer() -> None:
    """Pool of two chunks, one being loaded: a store may take the other, never this one."""
    manager = make_manager(rows=4, chunk_blocks=2)
    store(manager, [0, 1])
    request = start(manager, [0, 1])
    job = load(manager, request, computed=0, blocks=2)
    store(manager, [5, 6])
    store(manager, [7, 8])
    assert plan(manager, start(manager, [10, 11, 12, 13], "two-chunks")) is not None
    rows = {row for item in job.objects for row in item.tier_rows}
    record = manager.storage.tiers[0].index.readable_keys()
    assert len(record) == 1
    manager.check()

    manager.commit(done(job))

    assert rows == {0, 1}
    assert hit_blocks(manager, [0, 1]) == 2
    assert manager.lease_count == 0


# Failures.


@pytest.mark.parametrize("kind", [FailureKind.CHECKSUM, FailureKind.IO])
def test_ht_07_failed_load_takes_out_what_failed_and_nothing_else(kind: FailureKind) -> None:
    """The bad chunk is gone with a DELETE; the intact ones behind it stay, and hit again later."""
    manager = make_manager(rows=64, chunk_blocks=2)
    store(manager, range(10))
    manager.take_events()
    request = start(manager, range(10))
    job = load(manager, request, computed=0, blocks=10)
    failed = {2: kind, 3: FailureKind.AFTER_FAILURE, 4: FailureKind.AFTER_FAILURE}

    manager.commit(done(job, failed=failed))

    manager.check()
    (event,) = manager.take_events()
    assert isinstance(event, Delete)
    assert event.fact.chunk_hash == request.chain.hashes[5]
    assert hit_blocks(manager, range(10)) == 4
    assert manager.take_counters()["failures"] == {kind.value: 1, "after_failure": 2}
    assert request.hit_tokens == {"CPUMemory": 4 * BLOCK_TOKENS}
    store(manager, range(10))
    assert hit_blocks(manager, range(10)) == 10


def test_ht_34_next_lookup_after_a_failure_asks_the_books_anew() -> None:
    """A hit that could not be loaded is no hit the second time, so nobody loops on it."""
    manager = make_manager(rows=64, chunk_blocks=2)
    store(manager, range(4))
    request = start(manager, range(4))
    job = load(manager, request, computed=0, blocks=4)
    manager.commit(done(job, failed={0: FailureKind.CHECKSUM, 1: FailureKind.AFTER_FAILURE}))

    again = manager.lookup(request, computed_blocks=0, max_blocks=4, now=0)

    assert again.state is LookupState.MISS


@pytest.mark.parametrize("offset", [0, ROW_BYTES // 2, ROW_BYTES - 1])
def test_ht_13_damaged_chunk_is_a_miss_a_count_a_delete_and_is_written_anew(offset: int) -> None:
    """Flip one bit in memory: MISS, counter + 1, DELETE event, and the next store repairs it."""
    host = Host(make_manager(rows=32, chunk_blocks=2), 32)
    manager = host.manager
    request = host.store(list(range(6)))
    contents = replay({}, manager.take_events())
    host.memory.rows[3, offset] ^= 1

    outcome = host.load(list(range(6)))

    assert outcome.failed == {1: FailureKind.CHECKSUM, 2: FailureKind.AFTER_FAILURE}
    host.expect(request, range(2))
    assert manager.take_counters()["failures"] == {"checksum": 1, "after_failure": 1}
    events = manager.take_events()
    assert [type(event) for event in events] == [Delete]
    assert set(replay(contents, events)) == set(manager.storage.placements())
    assert hit_blocks(manager, range(6)) == 2
    host.store(list(range(6)), "again")
    assert hit_blocks(manager, range(6)) == 6
    host.load(list(range(6)))
    host.expect(request, range(6))


def test_ht_15_every_rank_must_have_loaded() -> None:
    """Two ranks, answers in any order, one of them bad: the object failed, the lease ends once."""
    manager = make_manager(rows=64, chunk_blocks=2, ranks=2)
    request = start(manager, range(4), "w")
    job = plan(manager, request)
    assert job is not None
    for rank in (1, 0):
        manager.commit(JobResult(job.job_id, rank))
    load_job = load(manager, start(manager, range(4)), computed=0, blocks=4)

    assert manager.commit(JobResult(load_job.job_id, 1)) is None
    assert manager.open_job_count == 1
    manager.check()
    bad = {1: FailureKind.CHECKSUM}
    assert manager.commit(JobResult(load_job.job_id, 0, bad)) is not None

    assert manager.open_job_count == 0
    assert hit_blocks(manager, range(4)) == 2
    manager.check()


def test_real_reason_wins_over_after_failure_of_another_rank() -> None:
    """Rank 0 stopped before chunk 1, rank 1 found it damaged: it is damaged."""
    manager = make_manager(rows=64, chunk_blocks=2, ranks=2)
    job = plan(manager, start(manager, range(4), "w"))
    assert job is not None
    for rank in range(2):
        manager.commit(JobResult(job.job_id, rank))
    load_job = load(manager, start(manager, range(4)), computed=0, blocks=4)
    stopped = {0: FailureKind.IO, 1: FailureKind.AFTER_FAILURE}
    manager.commit(JobResult(load_job.job_id, 0, stopped))
    manager.commit(JobResult(load_job.job_id, 1, {1: FailureKind.CHECKSUM}))

    assert manager.take_counters()["failures"] == {"io": 1, "checksum": 1}
    assert list(manager.storage.placements()) == []


def test_load_that_fails_after_its_object_left_takes_out_nothing_else() -> None:
    """HT-55: the object was replaced meanwhile; the replacement is not the one that failed."""
    manager = make_manager(rows=64, chunk_blocks=2)
    store(manager, range(2))
    job = load(manager, start(manager, range(2)), computed=0, blocks=2)
    manager.reset()
    store(manager, range(2))
    assert hit_blocks(manager, range(2)) == 2

    manager.commit(done(job, failed={0: FailureKind.CHECKSUM}))

    assert hit_blocks(manager, range(2)) == 2
    manager.check()


def test_result_of_an_unknown_job_is_ignored() -> None:
    """A duplicate or late answer changes nothing."""
    manager = make_manager(rows=64, chunk_blocks=2)
    job = plan(manager, start(manager, range(2)))
    assert manager.commit(done(job)) is not None

    assert manager.commit(done(job)) is None
    assert manager.commit(JobResult(999, 0)) is None
    manager.check()
