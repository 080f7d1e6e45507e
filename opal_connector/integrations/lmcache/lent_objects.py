"""LMCache's buffers as the paged blocks that Opal's tiers copy from and to."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from opal_connector.integrations.lmcache.identity import MOST_ROWS, ROW_BYTES
from opal_connector.tiers.base import Rows

_STRIDE: Final = MOST_ROWS + 1  # addresses of one buffer; no two buffers adjoin


class LentObject:
    """One buffer of LMCache's, lent for the time of one task.

    The memory object is kept with its bytes: what a late thread may still read stays mapped.
    """

    __slots__ = ("_memory_object", "address", "data")

    def __init__(self, memory_object: Any, size_bytes: int, address: int) -> None:
        self._memory_object = memory_object
        self.address = address
        view = np.frombuffer(memory_object.byte_array, dtype=np.uint8)
        self.data: NDArray[np.uint8] = view[:size_bytes]

    @property
    def addresses(self) -> tuple[int, ...]:
        """One address for every row that its bytes take."""
        row_count = -(-len(self.data) // ROW_BYTES)
        return tuple(range(self.address, self.address + row_count))


class LentObjects:
    """Buffers by address. What is past the end of the last row is zero in a tier.

    Mutable state: `_lent`, entries of which are added and removed by whoever begins and ends a
    task; single operations of a dictionary, which need no lock.
    """

    row_bytes = ROW_BYTES
    batch_blocks = 64

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lent: dict[int, LentObject] = {}

    def __len__(self) -> int:
        return len(self._lent)

    def lend(self, memory_object: Any, size_bytes: int) -> LentObject:
        """Give a buffer addresses, until it is returned."""
        number = next(self._numbers)
        lent = LentObject(memory_object, size_bytes, number * _STRIDE)
        self._lent[number] = lent
        return lent

    def give_back(self, lent: LentObject) -> None:
        """Nobody begins to copy from or to this buffer any more."""
        self._lent.pop(lent.address // _STRIDE, None)

    def ready_mark(self) -> object:
        """None: LMCache hands over what is complete."""
        return None

    def gather(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy pieces of buffers to rows."""
        del after
        for first, stop in _runs(block_ids, rows, tier_rows):
            piece = self._piece(block_ids[first], stop - first)
            target = rows[tier_rows[first] : tier_rows[stop - 1] + 1].reshape(-1)
            target[: len(piece)] = piece
            target[len(piece) :] = 0

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy rows to pieces of buffers."""
        del after
        for first, stop in _runs(block_ids, rows, tier_rows):
            piece = self._piece(block_ids[first], stop - first)
            source = rows[tier_rows[first] : tier_rows[stop - 1] + 1].reshape(-1)
            piece[:] = source[: len(piece)]

    def _piece(self, block_id: int, row_count: int) -> NDArray[np.uint8]:
        """Raises KeyError for a buffer that was returned: the task has ended without us."""
        number, row = divmod(block_id, _STRIDE)
        start = row * ROW_BYTES
        return self._lent[number].data[start : start + row_count * ROW_BYTES]


def _runs(
    block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Slices that are one piece of memory on both sides, as (first, stop).

    Every copy gives up the interpreter's lock, and may have to wait for it after.
    """
    are_packed = rows.strides[0] == rows.shape[1]
    first = 0
    for stop in range(1, len(block_ids) + 1):
        goes_on = (
            are_packed
            and stop < len(block_ids)
            and block_ids[stop] == block_ids[stop - 1] + 1
            and tier_rows[stop] == tier_rows[stop - 1] + 1
        )
        if not goes_on:
            yield first, stop
            first = stop
