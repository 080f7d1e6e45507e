"""What one kind of attention needs of the cache: which objects make a hit, which are worth storing.

One manager serves one attention group; `kinds.SINGLE_TYPE_MANAGERS` says which. What a kind looks
back on is `AttentionGroup.needed_blocks`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from opal_connector.keys import CHAIN_ROOT, AttentionGroup
from opal_connector.managers.presence import GroupPresence
from opal_connector.managers.records import ObjectKey, ObjectSpec, object_key
from opal_connector.managers.segments import GroupHit, Segment
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectName


class ChainEnd(msgspec.Struct, frozen=True, gc=False):
    """Where a sequence ends, and where hits of others ended that began like it.

    What stands before the last of these and is not needed there is passing: it serves only who
    leaves the sequence half-way.
    """

    tokens: int
    junction_tokens: int = 0
    alignment_tokens: int = 1

    def needed(self, group: AttentionGroup) -> list[tuple[int, int]]:
        """Blocks that are needed to go on from these ends, or from one alignment before.

        A hit leaves the last token to compute, so it may end one alignment earlier.
        """
        needed: list[tuple[int, int]] = []
        for end in (self.tokens, self.junction_tokens):
            if end:
                first, _ = group.needed_blocks(max(0, end - self.alignment_tokens))
                needed.append((first, -(-end // group.block_tokens)))
        return needed


class SingleTypeManager(ABC):
    """Plans for one attention group over the shared tiers. Holds no state but its settings.

    Attributes:
        group: Its position in the layout.
        attention: What is known of it.
        chunk_blocks: Its own blocks per object.
        is_chain: Whether an object is worth nothing without those before it.
    """

    is_chain: ClassVar[bool] = False

    def __init__(
        self,
        *,
        attention: AttentionGroup,
        chunk_tokens: int,
        group: int = 0,
        alignment_tokens: int | None = None,
        save_unfull_chunk: bool = True,
    ) -> None:
        self.group = group
        self.attention = attention
        self.alignment_tokens = alignment_tokens or attention.block_tokens
        self.chunk_blocks = self._object_tokens(chunk_tokens) // attention.block_tokens
        self.save_unfull_chunk = save_unfull_chunk

    @property
    def members(self) -> int:
        """Kv groups that have a row for every block of an object."""
        return len(self.attention.kv_groups)

    def presence(
        self, storage: OpalStorageManager, hashes: Sequence[bytes], *, is_hopeful: bool
    ) -> GroupPresence:
        """What is there of a sequence; with `is_hopeful` also what is coming or being loaded."""
        return GroupPresence(storage, hashes, self.group, self.chunk_blocks, is_hopeful=is_hopeful)

    @abstractmethod
    def servable_tokens(self, presence: GroupPresence, *, computed_tokens: int, most: int) -> int:
        """The longest servable length beyond `computed_tokens`, at most `most`; else the former.

        Lengths are multiples of the alignment. What lies before `computed_tokens` is there.
        """

    def segments(
        self, presence: GroupPresence, *, computed_tokens: int, tokens: int
    ) -> list[Segment]:
        """What brings the blocks that a hit of `tokens` needs beyond the computed ones."""
        first, stop = self.attention.needed_blocks(tokens)
        return presence.segments(max(first, computed_tokens // self.attention.block_tokens), stop)

    def storable(
        self,
        hashes: Sequence[bytes],
        *,
        first_chunk: int,
        full_blocks: int,
        include_tail: bool,
        end: ChainEnd | None = None,
    ) -> list[ObjectSpec]:
        """The objects over blocks `[0, full_blocks)` from chunk `first_chunk` on, head first."""
        chunk_blocks = self.chunk_blocks
        needed = end.needed(self.attention) if end is not None and not self.is_chain else None
        specs: list[ObjectSpec] = []
        for first in range(first_chunk * chunk_blocks, full_blocks, chunk_blocks):
            stop = min(first + chunk_blocks, full_blocks)
            is_tail = stop - first < chunk_blocks
            if is_tail and not (include_tail and self.save_unfull_chunk):
                break
            is_passing = needed is not None and not any(
                low < stop and first < high for low, high in needed
            )
            specs.append(self._spec(hashes, first, stop, is_passing=is_passing))
        return specs

    @abstractmethod
    def chain_keys(
        self, hashes: Sequence[bytes], *, ends: Sequence[int] = ()
    ) -> list[tuple[int, ObjectKey]]:
        """The keys whose objects the use of a sequence keeps fresh, with where they end. Tokens.

        `ends` are lengths that it was gone on from, or may be again.
        """

    def names(
        self, hashes: Sequence[bytes], first_block: int
    ) -> tuple[tuple[ObjectName, ...], tuple[ObjectName, ...]]:
        """Names of the whole chunks behind `first_block`, and of every tail, the longest first."""
        chunk_blocks = self.chunk_blocks
        first = first_block - first_block % chunk_blocks
        whole = len(hashes) - len(hashes) % chunk_blocks
        begin = max(first, whole)
        chunks = [
            self._name(hashes, start, start + chunk_blocks)
            for start in range(first, whole, chunk_blocks)
        ]
        tails = [
            self._name(hashes, begin, stop)
            for stop in range(len(hashes), max(first_block, begin), -1)
        ]
        return tuple(chunks), tuple(tails)

    def _name(self, hashes: Sequence[bytes], first: int, stop: int) -> ObjectName:
        parent_hash = hashes[first - 1] if first else CHAIN_ROOT
        return ObjectName(self.group, parent_hash, b"".join(hashes[first:stop]), self.members)

    def _object_tokens(self, chunk_tokens: int) -> int:
        return chunk_tokens

    def _spec(
        self, hashes: Sequence[bytes], first: int, stop: int, *, is_passing: bool = False
    ) -> ObjectSpec:
        return ObjectSpec(
            group=self.group,
            parent_hash=hashes[first - 1] if first else CHAIN_ROOT,
            run=b"".join(hashes[first:stop]),
            first_block=first,
            is_passing=is_passing,
        )

    def _keys(self, hashes: Sequence[bytes], first: int) -> list[tuple[int, ObjectKey]]:
        """Keys of full chunks from block `first` on, then of every possible tail."""
        chunk_blocks, block_tokens = self.chunk_blocks, self.attention.block_tokens
        whole = len(hashes) - len(hashes) % chunk_blocks
        begin = first - first % chunk_blocks
        ends = [*range(begin + chunk_blocks, whole + 1, chunk_blocks)]
        ends += range(max(begin, whole) + 1, len(hashes) + 1)
        return [(stop * block_tokens, object_key(hashes[stop - 1], self.group)) for stop in ends]


class FullAttentionManager(SingleTypeManager):
    """Every block from the first on must be there; also for MLA.

    blocks   0 ........ c*k ............ (c+1)*k ..... max_blocks
    have     [ computed )[ object c      )[ part of a sibling )  then nothing
    """

    is_chain = True

    def find_hit(
        self,
        storage: OpalStorageManager,
        hashes: list[bytes],
        *,
        computed_blocks: int,
        max_blocks: int,
    ) -> GroupHit:
        """The longest continuation of `computed_blocks` that the tiers hold, up to `max_blocks`."""
        chunk_blocks, block_tokens = self.chunk_blocks, self.attention.block_tokens
        segments: list[Segment] = []
        block = computed_blocks
        while block < max_blocks:
            chunk_start = block - block % chunk_blocks
            chunk_stop = chunk_start + chunk_blocks
            found = None
            if chunk_stop <= max_blocks:
                found = storage.find(object_key(hashes[chunk_stop - 1], self.group))
            if found is None:
                return self._finish(storage, hashes, segments, block, max_blocks)
            segments.append(
                Segment(
                    tier=found[0],
                    record=found[1],
                    first_block=block,
                    block_count=chunk_stop - block,
                    object_offset=block - chunk_start,
                    hit_tokens=(chunk_stop - block) * block_tokens,
                )
            )
            block = chunk_stop
        return GroupHit(tuple(segments), block, is_waiting=False)

    def _finish(
        self,
        storage: OpalStorageManager,
        hashes: list[bytes],
        segments: list[Segment],
        block: int,
        max_blocks: int,
    ) -> GroupHit:
        """End a walk inside a chunk: part of a sibling may continue it, a write may bring more."""
        chunk_start = block - block % self.chunk_blocks
        wanted = b"".join(hashes[chunk_start : min(chunk_start + self.chunk_blocks, max_blocks)])
        place, record, common = storage.find_run(wanted, self.group)
        stop = max(block, chunk_start + common)
        if record is not None and stop > block:
            segments.append(
                Segment(
                    tier=place,
                    record=record,
                    first_block=block,
                    block_count=stop - block,
                    object_offset=block - chunk_start,
                    hit_tokens=(stop - block) * self.attention.block_tokens,
                )
            )
        coming = chunk_start + storage.coming_blocks(wanted, self.group)
        return GroupHit(tuple(segments), stop, is_waiting=coming > stop)

    def servable_tokens(self, presence: GroupPresence, *, computed_tokens: int, most: int) -> int:
        """See `SingleTypeManager.servable_tokens`: the longest run from the first block on."""
        block_tokens, unit = self.attention.block_tokens, self.alignment_tokens
        draft_tokens = block_tokens if self.attention.is_draft else 0
        stop = presence.run_stop(
            computed_tokens // block_tokens, (most + draft_tokens) // block_tokens
        )
        tokens = min(most, stop * block_tokens - draft_tokens)
        return max(computed_tokens, tokens - tokens % unit)

    def chain_keys(
        self, hashes: Sequence[bytes], *, ends: Sequence[int] = ()
    ) -> list[tuple[int, ObjectKey]]:
        """See `SingleTypeManager.chain_keys`: all of them."""
        del ends
        return self._keys(hashes, 0)


class SinkFullAttentionManager(FullAttentionManager):
    """As full attention. The sinks are parameters of the model: no block of a sequence is one."""


class CrossAttentionManager(SingleTypeManager):
    """All blocks over the encoder's input, whatever the length: keyed by the input, not by tokens.

    `hashes` are those of the input here, which the host makes of its identifier. A part of it is
    worth nothing, so its tail is kept whatever is configured.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.save_unfull_chunk = True

    def servable_tokens(self, presence: GroupPresence, *, computed_tokens: int, most: int) -> int:
        """See `SingleTypeManager.servable_tokens`: any length, or none.

        Where something is computed, the host has the input.
        """
        is_there = computed_tokens > 0 or presence.hole(0, presence.block_count) is None
        return most - most % self.alignment_tokens if is_there else computed_tokens

    def segments(
        self, presence: GroupPresence, *, computed_tokens: int, tokens: int
    ) -> list[Segment]:
        """See `SingleTypeManager.segments`: the whole input, where nothing is computed yet."""
        del tokens
        return [] if computed_tokens else presence.segments(0, presence.block_count)

    def storable(
        self,
        hashes: Sequence[bytes],
        *,
        first_chunk: int,
        full_blocks: int,
        include_tail: bool,
        end: ChainEnd | None = None,
    ) -> list[ObjectSpec]:
        """See `SingleTypeManager.storable`: all of it, as soon as anything is computed."""
        del include_tail, end
        return super().storable(
            hashes,
            first_chunk=first_chunk,
            full_blocks=len(hashes) if full_blocks else 0,
            include_tail=True,
        )

    def chain_keys(
        self, hashes: Sequence[bytes], *, ends: Sequence[int] = ()
    ) -> list[tuple[int, ObjectKey]]:
        """See `SingleTypeManager.chain_keys`: all of the input."""
        del ends
        return self._keys(hashes, 0)
