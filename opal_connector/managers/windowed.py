"""The managers of what looks back on a part of the sequence only: windows, chunks, states."""

from collections.abc import Sequence
from math import gcd

from opal_connector.managers.presence import GroupPresence
from opal_connector.managers.records import ObjectKey, ObjectSpec, object_key
from opal_connector.managers.single_type import ChainEnd, SingleTypeManager


class WindowedManager(SingleTypeManager):
    """Only blocks that the next token looks at must be there: a set of lengths, with holes.

    Objects are short enough that all of one is still on the device when its last block is
    computed, whatever came before it.
    """

    def servable_tokens(self, presence: GroupPresence, *, computed_tokens: int, most: int) -> int:
        """See `SingleTypeManager.servable_tokens`.

        From the longest down. Where a block is missing, no length needs all of its window before
        the missing block has left the window: the next candidate ends in front of it.
        """
        block_tokens, unit = self.attention.block_tokens, self.alignment_tokens
        drafts = int(self.attention.is_draft)
        tokens = most - most % unit
        while tokens > computed_tokens:
            first, stop = self.attention.needed_blocks(tokens)
            first = max(first, computed_tokens // block_tokens)
            hole = presence.hole(first, stop + drafts if first < stop else stop)
            if hole is None:
                return tokens
            tokens = min(tokens - 1, (hole - drafts) * block_tokens)
            tokens -= tokens % unit
        return computed_tokens

    def chain_keys(
        self, hashes: Sequence[bytes], *, ends: Sequence[int] = ()
    ) -> list[tuple[int, ObjectKey]]:
        """See `SingleTypeManager.chain_keys`: what it takes to go on from these ends."""
        block_tokens, unit = self.attention.block_tokens, self.alignment_tokens
        found: dict[ObjectKey, int] = {}
        for end in ends:
            # Who asks the same again leaves the last token to compute, so he may go on earlier.
            is_whole = end >= len(hashes) * block_tokens
            first, _ = self.attention.needed_blocks(
                max(0, end - (unit if is_whole else end % unit))
            )
            stop = -(-end // block_tokens)
            # The object in which the end lies may go on behind it.
            stop = min(len(hashes), -(-stop // self.chunk_blocks) * self.chunk_blocks)
            found.update((key, tokens) for tokens, key in self._keys(hashes[:stop], first))
        return [(tokens, key) for key, tokens in found.items()]

    def _object_tokens(self, chunk_tokens: int) -> int:
        """The largest part of a chunk that the window covers wherever it ends.

        Where not even one alignment fits into the window, a part of one: hits end at alignments,
        but steps need not.
        """
        unit, block_tokens = self.alignment_tokens, self.attention.block_tokens
        most = min(chunk_tokens, max(self.attention.span_tokens, block_tokens))
        return max(
            size
            for size in range(block_tokens, most + 1, block_tokens)
            if chunk_tokens % size == 0 and (size % unit == 0 or unit % size == 0)
        )


class SlidingWindowManager(WindowedManager):
    """The blocks that the window before the next token touches; also for MLA."""


class ChunkedLocalManager(WindowedManager):
    """The blocks from the start of the present chunk on; none at its start."""

    def _object_tokens(self, chunk_tokens: int) -> int:
        common, unit = gcd(chunk_tokens, self.attention.span_tokens), self.alignment_tokens
        return common if common % unit == 0 else unit


class MambaManager(WindowedManager):
    """The one state behind the last token. Stored only when the host hands a state over."""

    def storable(
        self,
        hashes: Sequence[bytes],
        *,
        first_chunk: int,
        full_blocks: int,
        include_tail: bool,
        end: ChainEnd | None = None,
    ) -> list[ObjectSpec]:
        """Nothing by position: a table does not tell which state a block holds."""
        del hashes, first_chunk, full_blocks, include_tail, end
        return []

    def state_spec(self, hashes: Sequence[bytes], boundary_tokens: int) -> ObjectSpec | None:
        """The object of the state behind `boundary_tokens`; None if it could never serve a hit."""
        if boundary_tokens % self.alignment_tokens:
            return None
        stop = boundary_tokens // self.attention.block_tokens
        if not 0 < stop <= len(hashes):
            return None
        return self._spec(hashes, stop - 1, stop)

    def chain_keys(
        self, hashes: Sequence[bytes], *, ends: Sequence[int] = ()
    ) -> list[tuple[int, ObjectKey]]:
        """See `SingleTypeManager.chain_keys`: the states at these ends, and one before each."""
        block_tokens, unit = self.attention.block_tokens, self.alignment_tokens
        aligned = {end - end % unit for end in ends}
        aligned |= {end - unit for end in aligned}
        return [
            (end, object_key(hashes[end // block_tokens - 1], self.group))
            for end in sorted(aligned)
            if 0 < end <= len(hashes) * block_tokens
        ]

    def _object_tokens(self, chunk_tokens: int) -> int:
        del chunk_tokens
        return self.attention.block_tokens
