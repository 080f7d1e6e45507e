"""One object's file: written whole under a temporary name, read in parts. Knows no directory."""

import os
import stat
from collections.abc import Sequence

from typing_extensions import Buffer

from opal_connector.keys import HASH_BYTES
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


def expect_size(file: int, name: ObjectName, row_bytes: int) -> None:
    """Compare a file's size with what the object has. Blocks.

    Raises:
        ChecksumMismatchError: It is shorter or longer.
    """
    status = os.fstat(file)
    expected = file_bytes(len(name.run) // HASH_BYTES, row_bytes)
    if not stat.S_ISREG(status.st_mode) or status.st_size != expected:
        raise ChecksumMismatchError(f"a file has {status.st_size} bytes, not {expected}")


def read_record(
    file: int, header: memoryview, positions: Sequence[int], into: Rows, into_rows: Sequence[int]
) -> None:
    """Fill `header`, and row `into_rows[k]` with block `positions[k]`; looks at neither. Blocks.

    Header and rows come in one call where they are adjacent.

    Raises:
        ChecksumMismatchError: Bytes between two rows are not zero.
        EOFError: The file ends too early.
        OSError: The medium failed.
    """
    row_bytes = into.shape[1]
    stride = row_stride(row_bytes)
    gap = stride - row_bytes
    padding = bytearray(gap * len(positions))
    paddings = _split(memoryview(padding), gap)
    is_header_read = False
    for start, stop in file_io.adjacent_runs(positions):
        buffers = file_io.row_buffers(into, into_rows[start:stop], paddings[start:stop])
        offset = len(header) + positions[start] * stride
        if not is_header_read and positions[start] == 0:
            buffers, offset, is_header_read = [header, *buffers], 0, True
        file_io.read_fully(file, buffers, offset)
    if not is_header_read:
        file_io.read_fully(file, [header], 0)
    if any(padding):
        raise ChecksumMismatchError("there are bytes between the rows of a file")


def header_size(name: ObjectName) -> int:
    """Bytes of the header of this object's file."""
    return header_bytes(len(name.run) // HASH_BYTES)


def _split(view: memoryview, size: int) -> list[memoryview]:
    return [view[start : start + size] for start in range(0, len(view), size)] if size else []
