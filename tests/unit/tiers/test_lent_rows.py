"""Loads out of memory that an engine's client lends: nothing but verified rows reach a block."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from dict_engine import DictEngine, LendingClient
from file_tier_suite import NAMESPACE, OBJECT_ROWS, Pool, make_name

from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines import EngineTier
from opal_connector.tiers.file_errors import AbandonedError, ObjectGoneError
from opal_connector.tiers.file_moves import Staging, load_object
from opal_connector.tiers.keyed_tier import always
from opal_connector.transfers import ObjectTransfer

BLOCKS = 20
KEPT_ROWS = (7, 3, 4, 5, 0, 9)
UNTOUCHED = 0xA5
NAME = make_name(1)


class Bench:
    """An object in an engine, blocks that it is loaded to, and memory that may keep it."""

    def __init__(self, row_bytes: int) -> None:
        self.engine = DictEngine()
        self.client = LendingClient(self.engine)
        self.tier = EngineTier("Engine", self.client, row_bytes=row_bytes, rank=0)
        assert list(self.tier.open(NAMESPACE)) == []
        self.pool = Pool(row_bytes)
        self.pool.write(self.tier, NAME)
        self.memory = CPUMemory(allocate_host_rows(row_count=10, row_bytes=row_bytes))
        self.paged = ArrayBlocks(np.full((BLOCKS, row_bytes), UNTOUCHED, dtype=np.uint8))
        self.paged.batch_blocks = 4  # so that an object takes several calls

    def load(
        self, positions: Sequence[int], *, is_kept: bool = False, may_deliver: bool = True
    ) -> int:
        """Position p of the object to block p + 10."""
        item = ObjectTransfer(
            1,
            0,
            tuple(positions),
            tuple(position + 10 for position in positions),
            NAME.stamps,
            NAME,
            0,
            KEPT_ROWS if is_kept else (),
        )
        decide = always if may_deliver else lambda: False
        tiers = (self.memory, self.tier)
        return load_object(item, tiers, self.paged, None, Staging(), may_deliver=decide)

    def spoil(self, offset: int, *, of_row: int | None = None) -> None:
        """Change one byte of the value; of a row, or from the value's beginning."""
        key, value = next(iter(self.engine.values.items()))
        stride = -(-self.pool.row_bytes // 4096) * 4096
        start = 0 if of_row is None else len(value) - (OBJECT_ROWS - of_row) * stride
        changed = bytearray(value)
        changed[start + offset] ^= 1
        self.engine.values[key] = bytes(changed)

    def expect_delivered(self, positions: Sequence[int]) -> None:
        """These are in their blocks, and no other block was touched."""
        for position in positions:
            wanted = self.pool.wanted(NAME, position)
            assert np.array_equal(self.paged.blocks[position + 10], wanted)
        others = set(range(BLOCKS)) - {position + 10 for position in positions}
        assert all(np.all(self.paged.blocks[block] == UNTOUCHED) for block in others)


@pytest.fixture(params=[4096, 1000])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Rows that fill pages, and rows with padding between them."""
    bench = Bench(request.param)
    yield bench
    bench.tier.close()


@pytest.mark.parametrize("positions", [range(OBJECT_ROWS), [2, 3], [5, 0, 3]])
def test_blocks_are_filled_from_lent_memory(bench: Bench, positions: Sequence[int]) -> None:
    """The rows that are wanted and no others, in one request and without a copy in between."""
    bench.engine.calls.clear()
    assert bench.load(positions) == len(positions) * bench.pool.row_bytes
    bench.expect_delivered(positions)
    assert bench.engine.calls == [("lend", 1)]


@pytest.mark.parametrize("positions", [range(OBJECT_ROWS), [5, 0, 3]])
def test_what_is_kept_is_copied_once_and_served_from_memory(
    bench: Bench, positions: Sequence[int]
) -> None:
    """The whole object lies in the memory tier's rows, with check values that hold there."""
    bench.engine.calls.clear()
    bench.load(positions, is_kept=True)
    bench.expect_delivered(positions)
    assert bench.engine.calls == [("lend", 1)]
    bench.memory.verified_checks(KEPT_ROWS, NAME.stamps)
    for position, row in enumerate(KEPT_ROWS):
        assert np.array_equal(bench.memory.rows[row], bench.pool.wanted(NAME, position))


def test_a_client_that_lends_nothing_just_now_is_read_from(bench: Bench) -> None:
    """Values that come in several pieces are put together in rows of the thread's own."""
    bench.client.lends = False
    bench.engine.calls.clear()
    bench.load(range(OBJECT_ROWS))
    bench.expect_delivered(range(OBJECT_ROWS))
    assert bench.engine.calls == [("get", 1)]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("row", [0, OBJECT_ROWS - 1])
def test_a_damaged_row_reaches_no_block(bench: Bench, row: int, is_kept: bool) -> None:
    """Nor does any other row of the object, though the first ones of it are whole."""
    bench.spoil(bench.pool.row_bytes - 1, of_row=row)
    with pytest.raises(ChecksumMismatchError):
        bench.load(range(OBJECT_ROWS), is_kept=is_kept)
    bench.expect_delivered(())


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_damaged_header_or_padding_is_no_object(bench: Bench, is_kept: bool) -> None:
    """Bytes that no row has are looked at, too: they say whose object this is."""
    bench.spoil(100)
    with pytest.raises(ChecksumMismatchError):
        bench.load([1], is_kept=is_kept)
    bench.spoil(100)
    if bench.pool.row_bytes == 1000:
        bench.spoil(2000, of_row=1)
        with pytest.raises(ChecksumMismatchError):
            bench.load([1], is_kept=is_kept)
    bench.expect_delivered(())


def test_a_damaged_row_that_is_not_wanted_is_not_looked_at(bench: Bench) -> None:
    """A load of some rows is not refused for others, which nobody has asked for."""
    bench.spoil(5, of_row=1)
    bench.load([0, 2])
    bench.expect_delivered([0, 2])


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_value_of_another_size_reaches_no_block(bench: Bench, change: int, is_kept: bool) -> None:
    """Short or long: it is not what was stored."""
    key, value = next(iter(bench.engine.values.items()))
    bench.engine.values[key] = value[:-1] if change < 0 else value + b"x"
    with pytest.raises(ChecksumMismatchError):
        bench.load(range(OBJECT_ROWS), is_kept=is_kept)
    bench.expect_delivered(())


def test_a_load_that_was_given_up_touches_no_block(bench: Bench) -> None:
    """Its blocks may be somebody else's by now."""
    with pytest.raises(AbandonedError):
        bench.load(range(OBJECT_ROWS), may_deliver=False)
    bench.expect_delivered(())


def test_a_value_that_is_not_there_is_gone(bench: Bench) -> None:
    """A miss of its own kind, as with every other way to read."""
    bench.engine.values.clear()
    with pytest.raises(ObjectGoneError):
        bench.load(range(OBJECT_ROWS))
    bench.expect_delivered(())
