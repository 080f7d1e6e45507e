"""What one kind of attention needs of the cache: which objects make a hit, which are worth storing.

One manager serves one kv group. `SINGLE_TYPE_MANAGERS` maps the kind's name to its class; another
kind is another entry.
"""

from abc import ABC, abstractmethod

import msgspec

from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.managers.records import ObjectKey, ObjectRecord, ObjectSpec, object_key
from opal_connector.managers.storage_manager import OpalStorageManager


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Blocks of a request that one object brings.

    Blocks `[first_block, first_block + block_count)` of the sequence are the object's blocks from
    `object_offset` on.
    """

    tier: int
    record: ObjectRecord
    first_block: int
    block_count: int
    object_offset: int


class GroupHit(msgspec.Struct, frozen=True, gc=False):
    """A group's answer: the segments that continue the prefix, and whether waiting brings more."""

    segments: tuple[Segment, ...]
    stop_block: int
    is_waiting: bool


class SingleTypeManager(ABC):
    """Plans for one kv group over the shared tiers. Holds no state but its settings."""

    def __init__(self, *, group: int, chunk_blocks: int, save_unfull_chunk: bool) -> None:
        self.group = group
        self.chunk_blocks = chunk_blocks
        self.save_unfull_chunk = save_unfull_chunk

    @abstractmethod
    def find_hit(
        self,
        storage: OpalStorageManager,
        hashes: list[bytes],
        *,
        computed_blocks: int,
        max_blocks: int,
    ) -> GroupHit:
        """The longest continuation of `computed_blocks` that the tiers hold, up to `max_blocks`."""

    @abstractmethod
    def storable(
        self, hashes: list[bytes], *, first_chunk: int, full_blocks: int, include_tail: bool
    ) -> list[ObjectSpec]:
        """The objects over blocks `[0, full_blocks)` from chunk `first_chunk` on, head first."""

    @abstractmethod
    def chain_keys(self, hashes: list[bytes]) -> list[ObjectKey]:
        """The keys of all objects that a sequence may have, head first."""


class FullAttentionManager(SingleTypeManager):
    """Every block from the first on must be there; also for MLA.

    blocks   0 ........ c*k ............ (c+1)*k ..... max_blocks
    have     [ computed )[ object c      )[ part of a sibling )  then nothing
    """

    def find_hit(
        self,
        storage: OpalStorageManager,
        hashes: list[bytes],
        *,
        computed_blocks: int,
        max_blocks: int,
    ) -> GroupHit:
        """See `SingleTypeManager.find_hit`."""
        chunk_blocks = self.chunk_blocks
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
                )
            )
        coming = chunk_start + storage.coming_blocks(wanted, self.group)
        return GroupHit(tuple(segments), stop, is_waiting=coming > stop)

    def storable(
        self, hashes: list[bytes], *, first_chunk: int, full_blocks: int, include_tail: bool
    ) -> list[ObjectSpec]:
        """See `SingleTypeManager.storable`."""
        specs: list[ObjectSpec] = []
        for first in range(first_chunk * self.chunk_blocks, full_blocks, self.chunk_blocks):
            stop = min(first + self.chunk_blocks, full_blocks)
            is_tail = stop - first < self.chunk_blocks
            if is_tail and not (include_tail and self.save_unfull_chunk):
                break
            specs.append(
                ObjectSpec(
                    group=self.group,
                    parent_hash=hashes[first - 1] if first else CHAIN_ROOT,
                    run=b"".join(hashes[first:stop]),
                    first_block=first,
                )
            )
        return specs

    def chain_keys(self, hashes: list[bytes]) -> list[ObjectKey]:
        """See `SingleTypeManager.chain_keys`: full chunks, then every possible tail."""
        chunk_blocks = self.chunk_blocks
        whole = len(hashes) - len(hashes) % chunk_blocks
        keys = [
            object_key(hashes[stop - 1], self.group)
            for stop in range(chunk_blocks, whole + 1, chunk_blocks)
        ]
        keys.extend(object_key(chunk_hash, self.group) for chunk_hash in hashes[whole:])
        return keys


SINGLE_TYPE_MANAGERS: dict[str, type[SingleTypeManager]] = {
    "full_attention": FullAttentionManager,
}

assert HASH_BYTES == 32  # runs are cut at this width
