"""What the layers of a model look back on: which blocks must be there to go on from a length.

A model that mixes kinds of attention has several kv groups. Those of one kind, size and window are
cached, found and evicted together: they are one `AttentionGroup`. Books, events and the cluster's
index all speak of these by their position in the `AttentionLayout`.
"""

from enum import StrEnum
from functools import cached_property
from math import gcd, lcm
from typing import Literal

import msgspec

Retention = Literal["all", "window", "chunk", "last", "input"]


class AttentionKind(StrEnum):
    """The kinds that are known. The value is vLLM's own name for it."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SINK = "sink_full_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"
    CROSS = "cross_attention"


RETENTIONS: dict[str, Retention] = {
    AttentionKind.FULL: "all",
    AttentionKind.MLA: "all",
    AttentionKind.SINK: "all",
    AttentionKind.SLIDING_WINDOW: "window",
    AttentionKind.SLIDING_WINDOW_MLA: "window",
    AttentionKind.CHUNKED_LOCAL: "chunk",
    AttentionKind.MAMBA: "last",
    AttentionKind.CROSS: "input",
}


class AttentionGroup(msgspec.Struct, frozen=True, kw_only=True):
    """kv groups that are cached as one.

    Attributes:
        kind: See `AttentionKind`; `RETENTIONS` says what it looks back on.
        block_tokens: Tokens of one block.
        kv_groups: The engine's own numbers of the groups.
        span_tokens: The window of a sliding window, the chunk of chunked local attention.
        extra_tokens: Tokens that the engine keeps below a sliding window.
        is_draft: Whether a draft model reads it: its last block depends on the token behind it.
    """

    kind: str = AttentionKind.FULL.value
    block_tokens: int
    kv_groups: tuple[int, ...] = (0,)
    span_tokens: int = 0
    extra_tokens: int = 0
    is_draft: bool = False

    @property
    def retention(self) -> Retention:
        """What it looks back on: all, a window, the present chunk, one state, the encoder's input.

        An unknown kind is taken to need everything: what is said of it is never too much.
        """
        return RETENTIONS.get(self.kind, "all")

    def skipped_tokens(self, tokens: int) -> int:
        """Tokens of the beginning that nothing behind `tokens` looks at; the engine frees these."""
        match self.retention:
            case "window":
                return max(0, tokens - self.span_tokens + 1 - self.extra_tokens)
            case "chunk":
                return tokens - tokens % self.span_tokens
            case "last":
                return max(0, tokens - 1)
            case "input":
                return tokens
            case "all":
                return 0

    def needed_blocks(self, tokens: int) -> tuple[int, int]:
        """The blocks, as (first, behind the last), that must be there to go on from `tokens`."""
        stop = -(-tokens // self.block_tokens)
        return min(stop, self.skipped_tokens(tokens) // self.block_tokens), stop


class AttentionLayout(msgspec.Struct, frozen=True, dict=True):
    """All attention groups of a model, those that look back on everything first.

    Tokens are hashed by `hash_block_tokens`, of which every group's blocks are a multiple; hits
    end at multiples of `alignment_tokens`, where a block of every group ends. `scratch_tokens` is
    where blocks of all kv groups end that the engine has besides these and never caches, 0 if it
    has none.
    """

    groups: tuple[AttentionGroup, ...]
    scratch_tokens: int = 0

    @cached_property
    def hash_block_tokens(self) -> int:
        """Tokens per hash: what divides the blocks of all groups."""
        return gcd(*(group.block_tokens for group in self.groups))

    @cached_property
    def alignment_tokens(self) -> int:
        """Tokens at whose multiples a block of every group ends, as vLLM's scheduler rounds."""
        return lcm(self.scratch_tokens or 1, *(group.block_tokens for group in self.groups))

    @cached_property
    def kv_group_count(self) -> int:
        """The engine's groups that are cached."""
        return sum(len(group.kv_groups) for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether the engine has one kv group, which needs everything: a dense model.

        Only there a load that brought its beginning is of use: other engines take no single blocks
        for failed.
        """
        is_alone = self.kv_group_count == 1 and not self.scratch_tokens
        return is_alone and self.groups[0].retention == "all"


def plain_layout(block_tokens: int) -> AttentionLayout:
    """The layout of a dense model."""
    return AttentionLayout((AttentionGroup(block_tokens=block_tokens),))
