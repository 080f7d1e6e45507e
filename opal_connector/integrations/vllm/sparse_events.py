"""What vLLM's events of sparsely kept groups leave out: which of their blocks were stored."""

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.request import Request


class SparseSpan(msgspec.Struct, frozen=True):
    """An event with the hashes and extras of all blocks of its span, and which of them are there.

    It refers to the event, which so keeps its identity while the span is looked up by it.
    """

    event: BlockStored
    block_hashes: Sequence[ExternalBlockHash]
    present: Sequence[int]
    extra_keys: Sequence[Sequence[Any] | None] | None


def sparse_span(
    pool: BlockPool,
    event: BlockStored,
    request: Request,
    blocks: Sequence[KVCacheBlock],
    new_blocks: range,
    block_mask: Sequence[bool] | None,
) -> SparseSpan:
    """The span of an event, from what `BlockPool.cache_full_blocks` was called with."""
    block_size = event.block_size
    hashes = resolve_block_hashes(request.block_hashes, pool.hash_block_size, block_size)
    present = [
        place
        for place, index in enumerate(new_blocks)
        if not blocks[index].is_null and (block_mask is None or block_mask[place])
    ]
    return SparseSpan(
        event,
        [maybe_convert_block_hash(hashes[index]) for index in new_blocks],
        present,
        _extra_keys(request, new_blocks, block_size),
    )


def _extra_keys(
    request: Request, blocks: range, block_size: int
) -> Sequence[Sequence[Any] | None] | None:
    found: list[tuple[Any, ...] | None] = []
    input_index = 0
    for index in blocks:
        start = index * block_size
        keys, input_index = generate_block_hash_extra_keys(
            request, start, start + block_size, input_index
        )
        found.append(keys)
    return to_event_extra_keys(found) if any(found) else None
