"""Running a job: batches that cost one call, and failures that cost one object."""

from collections.abc import Sequence

import numpy as np
import pytest
from fakes import ROW_BYTES, FaultyTier, content, stamp, transfer

from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows, execute_job
from opal_connector.tiers.execute import execute_part, merge
from opal_connector.tiers.part_maker import slices
from opal_connector.transfers import FailureKind, JobResult, LoadJob, ObjectTransfer, StoreJob

ROWS = 300
UNTOUCHED = 0xA5


def memory() -> FaultyTier:
    """A tier without faults that records its calls."""
    store = CPUMemory(allocate_host_rows(row_count=ROWS, row_bytes=ROW_BYTES))
    return FaultyTier(store, lambda item: None)


def sources() -> ArrayBlocks:
    return ArrayBlocks(np.stack([content(stamp(number)) for number in range(ROWS)]))


def targets() -> ArrayBlocks:
    return ArrayBlocks(np.full((ROWS, ROW_BYTES), UNTOUCHED, dtype=np.uint8))


def chunk(first: int, blocks: int, tier: int = 0, group: int = 0) -> ObjectTransfer:
    """An object of adjacent rows, blocks and names from `first` on."""
    numbers = range(first, first + blocks)
    item = transfer(numbers, numbers, [stamp(number) for number in numbers], tier)
    return ObjectTransfer(tier, group, item.tier_rows, item.block_ids, item.stamps)


def sizes(tier: FaultyTier) -> list[int]:
    """Rows of every call."""
    return [len(item.tier_rows) for _, item in tier.calls]


def failing_on(*rows: int) -> FaultyTier:
    tier = memory()
    tier.fault = lambda item: OSError("no") if set(rows) & set(item.tier_rows) else None
    return tier


# Batches.


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([chunk(0, 1)], [1]),
        ([chunk(i, 1) for i in range(64)], [64]),
        ([chunk(i, 1) for i in range(65)], [64, 1]),
        ([chunk(0, 40), chunk(40, 40)], [40, 40]),
        ([chunk(0, 30), chunk(30, 30), chunk(60, 30)], [60, 30]),
        ([chunk(0, 200), chunk(200, 1)], [200, 1]),
        ([chunk(0, 1), chunk(1, 200), chunk(201, 1)], [1, 200, 1]),
    ],
    ids=["one", "full", "one-more", "two-large", "three", "larger-than-a-batch", "between"],
)
def test_neighbours_are_moved_in_one_call(
    objects: Sequence[ObjectTransfer], expected: list[int]
) -> None:
    """A call costs more than a small object; about 64 rows go in one, an object is never cut."""
    tier = memory()

    result = execute_job(StoreJob(1, tuple(objects)), tiers=[tier], paged=sources())

    assert result.failed == {}
    assert sizes(tier) == expected


def test_tiers_and_groups_are_never_mixed_in_a_call() -> None:
    """A call goes to one tier and one kv group."""
    one, other = memory(), memory()
    objects = (chunk(0, 1), chunk(1, 1, tier=1), chunk(2, 1), chunk(3, 1, group=1), chunk(4, 1))

    execute_job(StoreJob(1, objects), tiers=[one, other], paged=sources())

    assert [(item.group, item.tier_rows) for _, item in one.calls] == [
        (0, (0,)),
        (0, (2,)),
        (1, (3,)),
        (0, (4,)),
    ]
    assert sizes(other) == [1]


def test_merged_objects_keep_rows_blocks_and_names_together() -> None:
    """Position i of the whole is position i of one of the parts."""
    first = transfer([7, 3], [1, 9], [stamp(1), stamp(9)])
    second = transfer([5], [4], [stamp(4)])

    assert merge([first, second]) == transfer([7, 3, 5], [1, 9, 4], [stamp(1), stamp(9), stamp(4)])
    assert merge([first]) is first


# Failures.


def test_failed_batch_is_tried_object_by_object() -> None:
    """One bad object in a batch of stores fails alone."""
    tier = failing_on(5)
    paged = sources()

    result = execute_job(
        StoreJob(1, tuple(chunk(2 * i, 2) for i in range(5))), tiers=[tier], paged=paged
    )

    assert result.failed == {2: FailureKind.IO}
    assert result.moved[0][0] == 8 * ROW_BYTES
    assert sizes(tier) == [10, 2, 2, 2, 2, 2]


def test_object_that_fails_alone_is_tried_once() -> None:
    """A tier that needs its whole deadline to fail is not asked twice."""
    tier = failing_on(5)

    result = execute_job(StoreJob(1, (chunk(5, 1),)), tiers=[tier], paged=sources())

    assert result.failed == {0: FailureKind.IO}
    assert sizes(tier) == [1]


def test_load_stops_at_its_first_failure() -> None:
    """What follows a hole continues no prefix: it is not even read."""
    store = memory()
    execute_job(StoreJob(1, tuple(chunk(i, 1) for i in range(70))), tiers=[store], paged=sources())
    tier = FaultyTier(store.inner, lambda item: OSError("no") if 3 in item.tier_rows else None)
    paged = targets()

    result = execute_job(
        LoadJob(1, "r", tuple(chunk(i, 1) for i in range(70))), tiers=[tier], paged=paged
    )

    assert result.failed == {3: FailureKind.IO} | dict.fromkeys(
        range(4, 70), FailureKind.AFTER_FAILURE
    )
    assert [item.tier_rows for _, item in tier.calls[1:]] == [(0,), (1,), (2,), (3,)]
    for number in range(3):
        assert np.array_equal(paged.blocks[number], content(stamp(number)))
    assert np.all(paged.blocks[3:] == UNTOUCHED)


def test_damage_and_io_errors_are_told_apart() -> None:
    """Only damage costs the object its place in the tier's statistics of damage."""
    tier = memory()
    assert isinstance(tier.inner, CPUMemory)
    execute_job(StoreJob(1, (chunk(0, 2),)), tiers=[tier], paged=sources())
    tier.inner.rows[1][0] ^= 1

    result = execute_job(LoadJob(1, "r", (chunk(0, 2),)), tiers=[tier], paged=targets())

    assert result.failed == {0: FailureKind.CHECKSUM}


def test_part_reports_positions_in_its_job() -> None:
    """A slice of a job names objects as the whole job does."""
    tier = failing_on(4)
    objects = [chunk(i, 1) for i in range(6)]

    outcome = execute_part(
        objects=objects[3:],
        first=3,
        is_load=False,
        tiers=[tier],
        paged=sources(),
        after=None,
    )

    assert outcome.failed == {4: FailureKind.IO}


def test_failed_objects_count_no_bytes() -> None:
    """Bytes moved are bytes that are there."""
    tier = failing_on(0, 1)

    result = execute_job(StoreJob(1, (chunk(0, 2),)), tiers=[tier], paged=sources(), rank=3)

    assert result == JobResult(1, 3, {0: FailureKind.IO}, {})


def test_job_without_objects_ends() -> None:
    """Nothing to move is no failure."""
    assert execute_job(LoadJob(1, "r", ()), tiers=[], paged=targets()) == JobResult(1, 0)


# Slices for threads.


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "row_counts", [[1], [1, 1], [5, 1, 1, 1], [1, 1, 1, 5], [100, 1, 1], [3] * 17, [1, 2] * 9]
)
def test_slices_cover_every_object_once(row_counts: list[int], count: int) -> None:
    """At most one slice a thread, adjoining, none empty, none much larger than its share."""
    objects = []
    first = 0
    for rows in row_counts:
        objects.append(chunk(first, rows))
        first += rows

    ranges = slices(objects, count)

    assert [place for begin, stop in ranges for place in range(begin, stop)] == list(
        range(len(objects))
    )
    assert all(begin < stop for begin, stop in ranges)
    assert len(ranges) <= count
    share = sum(row_counts) / count + max(row_counts)
    assert all(sum(row_counts[begin:stop]) <= share for begin, stop in ranges)
