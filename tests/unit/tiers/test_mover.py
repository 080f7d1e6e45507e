"""Transfer threads: what goes first, what fails, and that every job is answered exactly once."""

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fakes import ROW_BYTES, FaultyTier, GatedTier, content, stamp, transfer

from opal_connector.tiers import (
    ArrayBlocks,
    CPUMemory,
    LaneSettings,
    Mover,
    TierStore,
    allocate_host_rows,
)
from opal_connector.transfers import FailureKind, JobResult, LoadJob, ObjectTransfer, StoreJob

ROWS = 64


def blocks_of_their_names() -> ArrayBlocks:
    """Paged block i holds the content of `stamp(i)`."""
    return ArrayBlocks(np.stack([content(stamp(number)) for number in range(ROWS)]))


def memory() -> CPUMemory:
    return CPUMemory(allocate_host_rows(row_count=ROWS, row_bytes=ROW_BYTES))


def single(*numbers: int) -> tuple[ObjectTransfer, ...]:
    """One-block objects: row, block and name of the same number."""
    return tuple(transfer([number], [number], [stamp(number)]) for number in numbers)


class Bench:
    """A mover, and a condition to wait on its results without polling the clock.

    Mutable state: the results taken so far.
    """

    def __init__(self, tiers: Sequence[TierStore], threads: int = 1) -> None:
        self.paged = blocks_of_their_names()
        self.mover = Mover(
            tiers, self.paged, rank=5, lanes=[LaneSettings(threads=threads)] * len(tiers)
        )
        self.results: dict[int, JobResult] = {}

    def wait(self, count: int, timeout_seconds: float = 20.0) -> dict[int, JobResult]:
        """Results of `count` jobs in all."""
        deadline = time.monotonic() + timeout_seconds
        while len(self.results) < count:
            for job, result in self.mover.take_results():
                assert job.job_id not in self.results, "answered twice"
                self.results[job.job_id] = result
            assert time.monotonic() < deadline, f"{len(self.results)} of {count} jobs ended"
            threading.Event().wait(0.001)
        return self.results


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> Iterator[MakeBench]:
    """Benches whose threads are ended with the test."""
    made: list[Bench] = []

    def make(*tiers: TierStore, threads: int = 1) -> Bench:
        made.append(Bench(tiers, threads))
        return made[-1]

    yield make
    for bench in made:
        for tier in bench.mover._tiers:
            if isinstance(tier, GatedTier):
                tier.open_all()
        assert bench.mover.close(20)


# Order.


def test_load_overtakes_queued_stores(make_bench: MakeBench) -> None:
    """A request waits for a load; nobody waits for a store."""
    tier = GatedTier(memory())
    bench = make_bench(tier)
    bench.mover.submit(StoreJob(1, single(0)))
    tier.wait_until_begun(1)
    bench.mover.submit(StoreJob(2, single(1)))
    bench.mover.submit(StoreJob(3, single(2)))
    bench.mover.submit(LoadJob(4, "r", single(0)))

    tier.open_all()
    results = bench.wait(4)

    assert tier.order == [("write", 0), ("read", 0), ("write", 1), ("write", 2)]
    assert results[4].failed == {}


def test_jobs_of_a_kind_keep_their_order(make_bench: MakeBench) -> None:
    """First come, first served among stores and among loads."""
    tier = GatedTier(memory())
    tier.open_all()
    bench = make_bench(tier)
    for number in range(20):
        bench.mover.submit(StoreJob(number, single(number)))
    bench.wait(20)

    assert [row for _, row in tier.order] == list(range(20))


def test_objects_of_a_job_are_split_among_the_threads(make_bench: MakeBench) -> None:
    """A large load uses all threads at once: both halves begin before either ends."""
    tier = GatedTier(memory())
    bench = make_bench(tier, threads=2)
    bench.mover.submit(StoreJob(1, single(0, 1, 2, 3)))

    tier.wait_until_begun(2)

    assert {row for _, row in tier.order} == {0, 2}
    tier.open_all()
    assert bench.wait(1)[1].failed == {}


# Results.


def test_result_says_what_was_moved(make_bench: MakeBench) -> None:
    """Bytes per tier, the seconds they took, and whose answer it is."""
    bench = make_bench(memory(), memory())
    objects = (*single(0, 1, 2), transfer([3], [3], [stamp(3)], tier=1))
    bench.mover.submit(StoreJob(7, objects))

    result = bench.wait(1)[7]

    assert (result.job_id, result.rank, result.failed) == (7, 5, {})
    assert {tier: moved for tier, (moved, _) in result.moved.items()} == {
        0: 3 * ROW_BYTES,
        1: ROW_BYTES,
    }
    assert all(seconds > 0 for _, seconds in result.moved.values())


def test_job_without_objects_is_answered(make_bench: MakeBench) -> None:
    """A load of nothing (all blocks missing) still ends, or its request would hang."""
    bench = make_bench(memory())
    bench.mover.submit(LoadJob(1, "r", (), missing_block_ids=(4, 5)))

    assert bench.wait(1)[1] == JobResult(1, 5)
    assert bench.mover.open_job_count == 0


def test_refused_job_is_answered_with_the_result_given(make_bench: MakeBench) -> None:
    """What could not be queued is reported like what failed."""
    bench = make_bench(memory())
    refused = JobResult(1, 5, {0: FailureKind.IO})
    bench.mover.refuse(StoreJob(1, single(0)), refused)

    assert bench.wait(1)[1] is refused


def test_every_job_is_answered_exactly_once_whatever_threads_do(make_bench: MakeBench) -> None:
    """Many jobs from many callers in many parts: one answer each, and every byte right."""
    bench = make_bench(memory(), threads=4)
    groups = [range(start, start + 4) for start in range(0, ROWS, 4)]
    with ThreadPoolExecutor(4) as callers:
        list(
            callers.map(
                lambda index: bench.mover.submit(StoreJob(index, single(*groups[index]))),
                range(len(groups)),
            )
        )
    bench.wait(len(groups))
    before = bench.paged.blocks.copy()
    bench.paged.blocks[:] = 0
    for index, group in enumerate(groups):
        bench.mover.submit(LoadJob(100 + index, "r", single(*group)))

    results = bench.wait(2 * len(groups))

    assert all(not result.failed for result in results.values())
    assert np.array_equal(bench.paged.blocks, before)
    assert bench.mover.open_job_count == 0
    assert bench.mover.take_results() == []


# Faults.


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "I/O error"),
        FileNotFoundError(errno.ENOENT, "gone"),
        PermissionError(errno.EACCES, "not yours"),
        OSError(errno.EMFILE, "too many files"),
        OSError(errno.ENOSPC, "full"),
        ValueError("a defect of the tier"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__ + str(getattr(error, "errno", "")),
)
def test_ht_35_error_of_a_tier_fails_its_object_and_no_thread(
    make_bench: MakeBench, error: Exception
) -> None:
    """Whatever a tier raises is one failed object; the thread goes on with the next job."""
    tier = FaultyTier(memory(), lambda item: error if 1 in item.tier_rows else None)
    bench = make_bench(tier)
    bench.mover.submit(StoreJob(1, single(0, 1, 2)))
    bench.mover.submit(StoreJob(2, single(3)))
    bench.wait(2)
    bench.mover.submit(LoadJob(3, "r", single(0, 1, 2, 3)))
    bench.mover.submit(LoadJob(4, "r", single(0, 2, 3)))

    results = bench.wait(4)

    assert results[1].failed == {1: FailureKind.IO}
    assert results[2].failed == {}
    assert results[3].failed == {
        1: FailureKind.IO,
        2: FailureKind.AFTER_FAILURE,
        3: FailureKind.AFTER_FAILURE,
    }
    assert results[4].failed == {}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_ht_07_load_that_fails_in_the_middle_fails_from_there_on(
    make_bench: MakeBench, threads: int
) -> None:
    """The 3rd of 5 fails: exactly 3, 4 and 5 are failed, however the job was split."""
    inner = memory()
    tier = FaultyTier(inner, lambda item: None)
    bench = make_bench(tier, threads=threads)
    bench.mover.submit(StoreJob(1, single(*range(5))))
    bench.wait(1)
    inner.rows[2][0] ^= 1
    bench.mover.submit(LoadJob(2, "r", single(*range(5))))

    assert bench.wait(2)[2].failed == {
        2: FailureKind.CHECKSUM,
        3: FailureKind.AFTER_FAILURE,
        4: FailureKind.AFTER_FAILURE,
    }


def test_unknown_tier_is_a_failed_object(make_bench: MakeBench) -> None:
    """A job of a newer scheduler half may name a tier that this worker does not have."""
    bench = make_bench(memory())
    bench.mover.submit(StoreJob(1, (transfer([0], [0], [stamp(0)], tier=3),)))

    assert bench.wait(1)[1].failed == {0: FailureKind.IO}


def test_thread_that_cannot_be_placed_works_where_it_is(make_bench: MakeBench) -> None:
    """CPUs that a container took away meanwhile cost speed, not the transfers."""
    mover = Mover(
        [memory()],
        blocks_of_their_names(),
        rank=0,
        lanes=[LaneSettings(threads=1)],
        cpus=frozenset({1_000_000}),
    )
    mover.submit(StoreJob(1, single(0)))
    for thread in mover._lanes[0]._threads:
        thread.join(0.2)
    try:
        assert all(thread.is_alive() for thread in mover._lanes[0]._threads)
        bench = make_bench(memory())
        bench.mover.close()
        bench.mover = mover
        assert bench.wait(1)[1].failed == {}
    finally:
        assert mover.close()


# The end.


def test_close_waits_for_what_is_running_and_drops_what_is_queued() -> None:
    """Nothing writes to memory after close has returned true."""
    tier = GatedTier(memory())
    mover = Mover([tier], blocks_of_their_names(), rank=0, lanes=[LaneSettings(threads=1)])
    mover.submit(StoreJob(1, single(0)))
    mover.submit(StoreJob(2, single(1)))
    tier.wait_until_begun(1)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(mover.close, 20)
        tier.open_all()

        assert closing.result(20) is True
    assert [job.job_id for job, _ in mover.take_results()] == [1]
    assert tier.order == [("write", 0)]


def test_close_with_stuck_threads_returns_within_its_bound() -> None:
    """I/O that never returns must not keep the engine from ending, however many threads wait."""
    tier = GatedTier(memory())
    mover = Mover([tier], blocks_of_their_names(), rank=0, lanes=[LaneSettings(threads=8)])
    mover.submit(StoreJob(1, single(*range(8))))
    tier.wait_until_begun(8)
    began = time.monotonic()

    assert mover.close(0.25) is False
    assert time.monotonic() - began < 1.0
    tier.open_all()
    assert mover.close(20) is True


def test_close_of_idle_threads_is_quick() -> None:
    """Idle threads are woken, not waited out."""
    mover = Mover([memory()], blocks_of_their_names(), rank=0, lanes=[LaneSettings(threads=4)])
    began = time.monotonic()

    assert mover.close(30) is True
    assert time.monotonic() - began < 10


def test_who_wants_to_know_is_told_of_every_result() -> None:
    """Also of those that need no thread: nobody has to ask in vain, or to wait."""
    told = threading.Semaphore(0)
    mover = Mover(
        [memory()],
        blocks_of_their_names(),
        rank=0,
        lanes=[LaneSettings(threads=1)],
        on_result=told.release,
    )
    mover.submit(StoreJob(1, single(0)))
    mover.submit(StoreJob(2, ()))

    assert told.acquire(timeout=20)
    assert told.acquire(timeout=20)
    assert {job.job_id for job, _ in mover.take_results()} == {1, 2}
    assert mover.close(20)
