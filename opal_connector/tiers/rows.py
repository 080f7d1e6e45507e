"""Paged blocks that are rows of a plain array: for hosts without vLLM's tensors, and for tests."""

from collections.abc import Sequence

from opal_connector.tiers.base import Rows


class ArrayBlocks:
    """`blocks[i]` is paged block i, `uint8` of shape (blocks, row_bytes), owned by the caller."""

    batch_blocks = 64

    def __init__(self, blocks: Rows) -> None:
        if blocks.ndim != 2 or blocks.dtype != "uint8":
            raise ValueError("paged blocks must be a two-dimensional uint8 array")
        self.blocks = blocks
        self.row_bytes = blocks.shape[1]

    def ready_mark(self) -> object:
        """None: the host itself writes the array."""
        return None

    def gather(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy blocks to rows."""
        del after
        for block_id, row in zip(block_ids, tier_rows, strict=True):
            rows[row] = self.blocks[block_id]

    def scatter(
        self, block_ids: Sequence[int], rows: Rows, tier_rows: Sequence[int], after: object
    ) -> None:
        """Copy rows to blocks."""
        del after
        for block_id, row in zip(block_ids, tier_rows, strict=True):
            self.blocks[block_id] = rows[row]
