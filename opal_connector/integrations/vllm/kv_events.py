"""Opal's events as vLLM's own, so that routers which users already run see the tiers.

The unit of these streams is the block: a block is announced when it begins to be retrievable from
a tier and withdrawn when it ceases to be, exactly once each, also where two chunks share it.
"""

from collections.abc import Iterable

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES

_MEDIA = {"CPUMemory": MEDIUM_CPU}


def host_events(events: Iterable[KVCEvent], block_tokens: int) -> list[KVCacheEvent]:
    """The same facts as BlockStored and BlockRemoved; a MOVE is stored, then removed."""
    translated: list[KVCacheEvent] = []
    for event in events:
        match event:
            case Insert(fact, tier, token_ids, lora_name):
                translated += _stored(fact, tier, block_tokens, token_ids, lora_name)
            case Delete(fact, tier):
                translated += _removed(fact, tier)
            case Copy(fact, _, target_tier, token_ids, lora_name):
                translated += _stored(fact, target_tier, block_tokens, token_ids, lora_name)
            case Move(fact, source_tier, target_tier, shared_blocks, token_ids, lora_name):
                translated += _stored(fact, target_tier, block_tokens, token_ids, lora_name)
                left = msgspec.structs.replace(fact, shared_blocks=shared_blocks)
                translated += _removed(left, source_tier)
    return translated


def _own_hashes(fact: ObjectFact) -> list[bytes]:
    """The hashes of the blocks that no other object of the tier holds."""
    return [
        fact.block_hashes[start : start + HASH_BYTES]
        for start in range(fact.shared_blocks * HASH_BYTES, len(fact.block_hashes), HASH_BYTES)
    ]


def _stored(
    fact: ObjectFact,
    tier: str,
    block_tokens: int,
    token_ids: tuple[int, ...],
    lora_name: str | None,
) -> list[KVCacheEvent]:
    hashes = _own_hashes(fact)
    if not hashes:
        return []
    parent: bytes | None = fact.parent_hash if fact.parent_hash != CHAIN_ROOT else None
    if fact.shared_blocks:
        end = fact.shared_blocks * HASH_BYTES
        parent = fact.block_hashes[end - HASH_BYTES : end]
    return [
        BlockStored(
            block_hashes=list(hashes),
            parent_block_hash=parent,
            token_ids=list(token_ids[fact.shared_blocks * block_tokens :]),
            block_size=block_tokens,
            lora_id=None,
            medium=_MEDIA.get(tier, MEDIUM_STORAGE),
            lora_name=lora_name,
            group_idx=fact.group,
            ownership=tier,
        )
    ]


def _removed(fact: ObjectFact, tier: str) -> list[KVCacheEvent]:
    hashes = _own_hashes(fact)
    if not hashes:
        return []
    return [
        BlockRemoved(
            block_hashes=list(hashes),
            medium=_MEDIA.get(tier, MEDIUM_STORAGE),
            group_idx=fact.group,
            ownership=tier,
        )
    ]
