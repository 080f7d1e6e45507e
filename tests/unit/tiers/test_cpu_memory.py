"""Host memory: where its rows lie, and the buffers that it hands out."""

import numpy as np
import pytest
from fakes import ROW_BYTES, content, stamp, transfer

from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows


@pytest.fixture
def memory() -> CPUMemory:
    """Rows 0 to 7 hold the contents of `stamp(0)` to `stamp(7)`."""
    made = CPUMemory(allocate_host_rows(row_count=10, row_bytes=ROW_BYTES))
    names = [stamp(number) for number in range(8)]
    paged = ArrayBlocks(np.stack([content(name) for name in names]))
    made.write(transfer(range(8), range(8), names), paged, None)
    return made


def test_rows_are_zeroed_writable_and_adjacent() -> None:
    """One allocation, cut into rows without gaps."""
    rows = allocate_host_rows(row_count=7, row_bytes=24)

    assert rows.shape == (7, 24)
    assert rows.flags.c_contiguous
    assert rows.flags.writeable
    assert not rows.any()


def test_pool_without_rows_is_allowed() -> None:
    """A capacity below one block leaves a tier that takes nothing, and no error."""
    assert allocate_host_rows(row_count=0, row_bytes=24).shape == (0, 24)


def test_buffer_of_adjacent_rows_is_a_view(memory: CPUMemory) -> None:
    """No copy where none is needed; the tier's name is where the bytes really are."""
    made = memory.memory_obj((2, 3, 4))

    assert np.shares_memory(made.rows, memory.rows)
    assert made.location_tier == "CPUMemory"
    assert made.size_bytes == 3 * ROW_BYTES
    assert np.array_equal(made.rows, [content(stamp(number)) for number in (2, 3, 4)])


@pytest.mark.parametrize("rows", [(4, 2), (3, 2), (1, 3, 5)])
def test_buffer_of_scattered_rows_is_a_copy_in_order(
    memory: CPUMemory, rows: tuple[int, ...]
) -> None:
    """The object's order, not the pool's."""
    made = memory.memory_obj(rows)

    assert not np.shares_memory(made.rows, memory.rows)
    assert np.array_equal(made.rows, [content(stamp(number)) for number in rows])


@pytest.mark.parametrize("rows", [(2, 3), (3, 1)])
def test_buffer_cannot_be_written(memory: CPUMemory, rows: tuple[int, ...]) -> None:
    """Whoever gets a buffer cannot change what others will load; the pool stays writable."""
    made = memory.memory_obj(rows)

    with pytest.raises(ValueError, match="read-only"):
        made.rows[0, 0] = 1
    assert memory.rows.flags.writeable


def test_large_rows_are_checked_in_full() -> None:
    """Rows larger than one piece of the hashing: every piece counts, the last one too."""
    row_bytes = 3 * (64 << 10) + 5
    made = CPUMemory(allocate_host_rows(row_count=1, row_bytes=row_bytes))
    paged = ArrayBlocks(np.arange(row_bytes, dtype=np.uint32).astype(np.uint8)[None, :])
    item = transfer([0], [0], [stamp(0)])
    made.write(item, paged, None)
    for offset in (0, 64 << 10, (64 << 10) - 1, 2 * (64 << 10), row_bytes - 1):
        made.rows[0, offset] ^= 1
        with pytest.raises(Exception, match="row 0 of CPUMemory"):
            made.read(item, paged, None)
        made.rows[0, offset] ^= 1

    assert made.read(item, paged, None) == row_bytes


def test_paged_blocks_of_another_shape_are_refused() -> None:
    """Only rows of bytes are blocks."""
    for wrong in (np.zeros(4, dtype=np.uint8), np.zeros((2, 2), dtype=np.int8)):
        with pytest.raises(ValueError, match="two-dimensional uint8"):
            ArrayBlocks(wrong)
