"""Rows of one tier: handed out once, taken back once."""

import random

import pytest

from opal_connector.managers import TierPool


def test_rows_are_handed_out_once_until_they_come_back() -> None:
    """No two owners of a row, over many rounds."""
    pool = TierPool(capacity_rows=20, row_bytes=8)
    draw = random.Random(1)
    owned: list[tuple[int, ...]] = []
    for _ in range(500):
        rows = pool.allocate(draw.randint(1, 6))
        if rows is None:
            rows = owned.pop(draw.randrange(len(owned)))
            pool.free(rows, len(rows) * 8)
        else:
            owned.append(rows)
        everything = [row for rows in owned for row in rows]
        assert len(everything) == len(set(everything)) == pool.used_rows
        assert pool.free_rows + pool.used_rows == 20
        pool.check()


def test_too_many_rows_are_refused_and_none_is_taken() -> None:
    """All or nothing."""
    pool = TierPool(capacity_rows=4, row_bytes=8)
    pool.allocate(3)

    assert pool.allocate(2) is None
    assert pool.used_rows == 3
    assert pool.allocate(1) is not None


def test_used_rows_are_used_again_before_fresh_ones() -> None:
    """Memory that was never needed is never touched."""
    pool = TierPool(capacity_rows=1000, row_bytes=8)
    for _ in range(50):
        rows = pool.allocate(3)
        assert rows is not None
        assert max(rows) < 3
        pool.free(rows, 24)


def test_object_gets_adjacent_rows_again() -> None:
    """Rows that came back together go out in the same order, so that copies stay large."""
    pool = TierPool(capacity_rows=16, row_bytes=8)
    rows = pool.allocate(4)
    assert rows == (0, 1, 2, 3)
    pool.free(rows, 32)

    assert pool.allocate(4) == (0, 1, 2, 3)


def test_auditor_finds_a_row_that_came_back_twice() -> None:
    """The auditor is what the property tests rely on."""
    pool = TierPool(capacity_rows=4, row_bytes=8)
    rows = pool.allocate(2)
    assert rows is not None
    pool.free(rows, 16)
    pool.free(rows[:1], 8)

    with pytest.raises(AssertionError, match="twice"):
        pool.check()


@pytest.mark.parametrize(("capacity_rows", "row_bytes"), [(-1, 8), (4, 0)])
def test_pool_without_sense_is_refused(capacity_rows: int, row_bytes: int) -> None:
    """A negative pool or rows without bytes are a defect of the caller."""
    with pytest.raises(ValueError, match="rows of at least one byte"):
        TierPool(capacity_rows=capacity_rows, row_bytes=row_bytes)
