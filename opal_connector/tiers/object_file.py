"""One object's file: written whole under a temporary name, read in parts. Knows no directory."""

import os
import stat
from collections.abc import Sequence

from typing_extensions import Buffer

from opal_connector.tiers import file_io
from opal_connector.tiers.base import ChecksumMismatchError, Rows
from opal_connector.tiers.record import file_bytes, header_bytes, row_stride
from opal_connector.transfers import ObjectName


def record_buffers(header: memoryview, rows: Rows, tier_rows: Sequence[int]) -> list[Buffer]:
    """What a file consists of, in its order, without a copy of any row."""
    row_bytes = rows.shape[1]
    padding = bytes(row_stride(row_bytes) - row_bytes)
    paddings = [padding] * len(tier_rows) if padding else []
    return [header, *file_io.row_buffers(rows, tier_rows, paddings)]


def read_record(
    file: int,
    header: memoryview,
    name: ObjectName,
    positions: Sequence[int],
    into: Rows,
    into_rows: Sequence[int],
) -> None:
    """Fill `header`, and row `into_rows[k]` with block `positions[k]`; looks at neither. Blocks.

    Header and rows come in one call where they are adjacent, and where the last block is among
    them the same call finds the file's end: every call costs a wait for the interpreter's lock.

    Raises:
        ChecksumMismatchError: The file has another size than the object, or bytes between rows.
        OSError: The medium failed.
    """
    row_bytes = into.shape[1]
    stride = row_stride(row_bytes)
    gap = stride - row_bytes
    padding = bytearray(gap * len(positions))
    paddings = _split(memoryview(padding), gap) if gap else []
    last = name.row_count - 1
    is_header_read = is_end_found = False
    try:
        for start, stop in file_io.adjacent_runs(positions):
            buffers = file_io.row_buffers(into, into_rows[start:stop], paddings[start:stop])
            offset = len(header) + positions[start] * stride
            if not is_header_read and positions[start] == 0:
                buffers, offset, is_header_read = [header, *buffers], 0, True
            if positions[stop - 1] == last:
                is_end_found = file_io.read_to_end(file, buffers, offset)
            else:
                file_io.read_fully(file, buffers, offset)
        if not is_header_read:
            file_io.read_fully(file, [header], 0)
    except (EOFError, OSError):
        # Direct I/O cannot go on behind an odd end: what it calls an error may be a short file.
        _expect_size(file, name, row_bytes)
        raise
    if not is_end_found:
        _expect_size(file, name, row_bytes)
    if any(padding):
        raise ChecksumMismatchError("there are bytes between the rows of a file")


def _expect_size(file: int, name: ObjectName, row_bytes: int) -> None:
    status = os.fstat(file)
    expected = file_bytes(name.block_count, row_bytes, name.members)
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected:
        raise ChecksumMismatchError(f"a file has {status.st_size} bytes, not {expected}")


def header_size(name: ObjectName) -> int:
    """Bytes of the header of this object's file."""
    return header_bytes(name.block_count, name.members)


def _split(view: memoryview, size: int) -> list[memoryview]:
    return [view[start : start + size] for start in range(0, len(view), size)]
