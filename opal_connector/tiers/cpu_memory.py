"""`CPUMemory`: one pool of rows in host memory, allocated once.

Every row carries a check value over its bytes, seeded with the hash of the block that it holds. A
read under another name, of a row that was being rewritten or of a byte that changed does not
verify, so it is a miss and never somebody else's KV.
"""

import contextlib
import mmap
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from opal_connector.tiers.base import PagedBlocks, Rows, TierStore
from opal_connector.tiers.checks import EMPTY, row_check, verify_row
from opal_connector.tiers.shared_memory import host_memory
from opal_connector.transfers import ObjectTransfer


class OpalMemoryObj(msgspec.Struct, frozen=True, eq=False):
    """One object's buffer, read-only, and the tier that it lies in.

    `rows` has shape (blocks, row_bytes). It is valid while the object is leased.
    """

    rows: NDArray[np.uint8]
    location_tier: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer."""
        return int(self.rows.nbytes)


def allocate_host_rows(*, row_count: int, row_bytes: int) -> Rows:
    """Zeroed rows that another process can map, in huge pages where the kernel has them.

    Pages are taken from the system when a row is first written.
    """
    size_bytes = max(1, row_count * row_bytes)
    buffer = host_memory(size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel without huge pages only makes the first writes slower.
        with contextlib.suppress(OSError):
            buffer.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(buffer, dtype=np.uint8)
    return rows[: row_count * row_bytes].reshape(row_count, row_bytes)


class CPUMemory(TierStore):
    """Rows of host memory.

    Mutable state: `rows` and `_checks`, one entry per row. No lock: the books hand a row to one
    writer, or to readers, at a time, and `_checks` tells if they did not.
    """

    name = "CPUMemory"

    def __init__(self, rows: Rows, checks: NDArray[np.uint64] | None = None) -> None:
        """Take rows, and where their check values are to be if others read them too."""
        self.rows = rows
        self._checks = np.zeros(rows.shape[0], dtype=np.uint64) if checks is None else checks

    @override
    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        tier_rows, block_ids = item.tier_rows, item.block_ids
        for row in tier_rows:
            self._checks[row] = EMPTY
        checks: list[int] = []
        batch = paged.batch_blocks
        for start in range(0, len(tier_rows), batch):
            stop = min(start + batch, len(tier_rows))
            paged.gather(block_ids[start:stop], self.rows, tier_rows[start:stop], after)
            checks += [
                row_check(self.rows[tier_rows[position]], item.stamps, position)
                for position in range(start, stop)
            ]
        for row, check in zip(tier_rows, checks, strict=True):  # all of the object, or nothing
            self._checks[row] = check
        return len(tier_rows) * int(self.rows.shape[1])

    @override
    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        tier_rows, block_ids = item.tier_rows, item.block_ids
        batch = paged.batch_blocks
        for start in range(0, len(tier_rows), batch):
            stop = min(start + batch, len(tier_rows))
            for position in range(start, stop):
                row = tier_rows[position]
                expected, place = int(self._checks[row]), f"row {row} of {self.name}"
                verify_row(self.rows[row], item.stamps, position, expected, place)
            paged.scatter(block_ids[start:stop], self.rows, tier_rows[start:stop], after)
        return len(tier_rows) * int(self.rows.shape[1])

    def set_checks(self, tier_rows: Sequence[int], checks: Sequence[int]) -> None:
        """Make rows readable that were filled and checked from outside."""
        for row, check in zip(tier_rows, checks, strict=True):
            self._checks[row] = check

    def verified_checks(self, tier_rows: Sequence[int], stamps: bytes) -> list[int]:
        """The check values of an object's rows, after comparing them with the bytes. Blocks.

        Raises:
            ChecksumMismatchError: A row is not what was stored there under these stamps.
        """
        checks = [int(self._checks[row]) for row in tier_rows]
        for position, (row, check) in enumerate(zip(tier_rows, checks, strict=True)):
            verify_row(self.rows[row], stamps, position, check, f"row {row} of {self.name}")
        return checks

    def memory_obj(self, tier_rows: tuple[int, ...]) -> OpalMemoryObj:
        """A read-only copy-free view if the rows are adjacent, a copy otherwise."""
        first, count = tier_rows[0], len(tier_rows)
        if tier_rows == tuple(range(first, first + count)):
            view = self.rows[first : first + count]
        else:
            view = self.rows[list(tier_rows)]
        view.flags.writeable = False
        return OpalMemoryObj(view, self.name)
