"""The two contracts of a transfer: the tier at one end, the paged KV blocks at the other."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from opal_connector.transfers import ObjectTransfer

Rows = NDArray[np.uint8]


class ChecksumMismatchError(Exception):
    """What a tier read is not what was written there under that name."""


class PagedBlocks(Protocol):
    """The paged KV cache of one rank, block by block, as rows of `row_bytes` bytes.

    Calls block until the bytes are where they belong. They run in transfer threads.
    """

    row_bytes: int
    batch_blocks: int  # blocks that one call gets at most

    def ready_mark(self) -> object:
        """A mark of the work queued on the device so far; None where the host does the work."""

    def gather(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy block `block_ids[i]` to `rows[tier_rows[i]]`, not before the mark `after`."""

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy `rows[tier_rows[i]]` to block `block_ids[i]`, not before the mark `after`.

        The rows may be read-only, with bytes between them that belong to none.
        """


class TierStore(ABC):
    """The bytes of one tier.

    A write makes a row readable under the stamps of its blocks, a read under other stamps or of
    other bytes is an error. Rows are handed out by the books, so no two calls touch one row.
    """

    name: str

    @abstractmethod
    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        """Store an object's blocks; returns the bytes written. Blocks.

        Raises:
            OSError: The medium failed. Nothing of the object is readable then.
        """

    @abstractmethod
    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        """Load an object's blocks; returns the bytes read. Blocks.

        Raises:
            ChecksumMismatchError: The bytes are not those that were stored. Destination blocks
                may have been written to, but never from a row that did not verify.
            OSError: The medium failed.
        """

    def close(self) -> None:  # noqa: B027 - memory needs nothing here
        """Give up threads, files and memory. No call follows."""
