"""Opal's events as vLLM's own, so that routers which users already run see the tiers.

The unit of these streams is the block: a block is announced when it begins to be retrievable from
a tier and withdrawn when it ceases to be, exactly once each, also where two chunks share it.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES

LOCAL: Final = "LOCAL"
REMOTE: Final = "REMOTE"


class TierName(NamedTuple):
    """How vLLM's events name a tier; of the tiers of one instance no two have the same.

    `ownership` names a secondary tier, and routers give less for those or pass them over. So only a
    tier that is not the instance's own has one; its own are told apart by the medium.
    """

    medium: str
    locality: str
    ownership: str | None = None


_NAMES = {
    "CPUMemory": TierName(MEDIUM_CPU, LOCAL),
    "LocalNVMe": TierName(MEDIUM_STORAGE, LOCAL),
}


def tier_name(tier: str) -> TierName:
    """The name of a tier in vLLM's events."""
    return _NAMES.get(tier) or TierName(MEDIUM_STORAGE, REMOTE, tier)


def host_events(events: Iterable[KVCEvent], block_tokens: int) -> list[KVCacheEvent]:
    """The same facts as BlockStored and BlockRemoved; a MOVE is stored, then removed."""
    translated: list[KVCacheEvent] = []
    for event in events:
        match event:
            case Insert(_, tier):
                translated += _stored(event, tier, block_tokens)
            case Delete(fact, tier):
                translated += _removed(fact, tier)
            case Copy(_, _, target_tier):
                translated += _stored(event, target_tier, block_tokens)
            case Move(fact, source_tier, target_tier, shared_blocks):
                translated += _stored(event, target_tier, block_tokens)
                left = msgspec.structs.replace(fact, shared_blocks=shared_blocks)
                translated += _removed(left, source_tier)
    return translated


def _own_hashes(fact: ObjectFact) -> list[ExternalBlockHash]:
    """The hashes of the blocks that no other object of the tier holds."""
    return [
        external_hash(fact.block_hashes[start : start + HASH_BYTES])
        for start in range(fact.shared_blocks * HASH_BYTES, len(fact.block_hashes), HASH_BYTES)
    ]


def external_hash(digest: bytes) -> ExternalBlockHash:
    """A digest in the form in which vLLM publishes its own hashes.

    Routers that know only one form cannot read a whole batch in which it is another one, the
    device's events in it included.
    """
    return maybe_convert_block_hash(BlockHash(digest))


def _stored(event: Insert | Copy | Move, tier: str, block_tokens: int) -> list[KVCacheEvent]:
    fact = event.fact
    hashes = _own_hashes(fact)
    if not hashes:
        return []
    parent = external_hash(fact.parent_hash) if fact.parent_hash != CHAIN_ROOT else None
    if fact.shared_blocks:
        end = fact.shared_blocks * HASH_BYTES
        parent = external_hash(fact.block_hashes[end - HASH_BYTES : end])
    name = tier_name(tier)
    return [
        BlockStored(
            block_hashes=hashes,
            parent_block_hash=parent,
            token_ids=list(event.token_ids[fact.shared_blocks * block_tokens :]),
            block_size=block_tokens,
            lora_id=None,
            medium=name.medium,
            lora_name=event.lora_name,
            extra_keys=_extra_keys(event),
            group_idx=fact.group,
            locality=name.locality,
            ownership=name.ownership,
        )
    ]


def _removed(fact: ObjectFact, tier: str) -> list[KVCacheEvent]:
    hashes = _own_hashes(fact)
    if not hashes:
        return []
    name = tier_name(tier)
    return [
        BlockRemoved(
            block_hashes=hashes,
            medium=name.medium,
            group_idx=fact.group,
            locality=name.locality,
            ownership=name.ownership,
        )
    ]


def _extra_keys(event: Insert | Copy | Move) -> list[tuple[Any, ...] | None] | None:
    """Adapter, inputs and salt of the event's own blocks: without them equal tokens look equal."""
    own = event.extra_keys[event.fact.shared_blocks :]
    return [keys or None for keys in own] if any(own) else None
