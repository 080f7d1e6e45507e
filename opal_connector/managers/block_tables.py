"""Where a request's blocks lie in the paged KV cache, as the host says it."""

from collections.abc import Sequence

import msgspec

NO_BLOCK = -1  # a position whose block the host has not, or has no more


class BlockTables(msgspec.Struct, frozen=True):
    """A request's paged blocks, from the first block of its sequence on, by kv group.

    A block's address is its number plus `group_stride` times the number of its kv group.
    `null_block` is the number that stands for "none": behind a window, or a state that is not kept.
    """

    tables: tuple[Sequence[int], ...]
    group_stride: int = 0
    null_block: int = NO_BLOCK

    def addresses(self, kv_group: int, first: int, stop: int) -> list[int]:
        """The addresses of blocks `[first, stop)` of a kv group, `NO_BLOCK` where there is none."""
        numbers = self.tables[kv_group][first:stop]
        base, null_block = kv_group * self.group_stride, self.null_block
        found = [NO_BLOCK if number == null_block else base + number for number in numbers]
        return found + [NO_BLOCK] * (stop - first - len(found))


def one_table(block_ids: Sequence[int]) -> BlockTables:
    """The tables of a host with one kv group and no null block."""
    return BlockTables((block_ids,))


class StateBlock(msgspec.Struct, frozen=True):
    """A block that holds a state as it is behind so many tokens, and keeps it for this step."""

    kv_group: int
    block_id: int
    boundary_tokens: int
