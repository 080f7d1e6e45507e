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
from opal_connector.keys.attention import AttentionLayout

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


class GroupName(NamedTuple):
    """How vLLM's events name a kv group, and what they say of it.

    The kind is left out where there is only one group, and it could be no other.
    """

    number: int
    block_tokens: int
    kind: str | None = None
    window_tokens: int | None = None


def group_names(layout: AttentionLayout) -> list[list[GroupName]]:
    """The kv groups of every attention group, by which its objects are announced.

    None of what is not found by the prompt's tokens.
    """
    if layout.is_plain:
        (group,) = layout.groups
        return [[GroupName(group.kv_groups[0], group.block_tokens)]]
    return [
        [
            GroupName(
                number,
                group.block_tokens,
                group.kind,
                group.span_tokens if group.retention == "window" else None,
            )
            for number in group.kv_groups
            if group.retention != "input"
        ]
        for group in layout.groups
    ]


def host_events(events: Iterable[KVCEvent], layout: AttentionLayout) -> list[KVCacheEvent]:
    """The same facts as BlockStored and BlockRemoved; a MOVE is stored, then removed.

    An object of several kv groups is announced for each of them.
    """
    names = group_names(layout)
    translated: list[KVCacheEvent] = []
    for event in events:
        for group in names[event.fact.group]:
            translated += _of_group(event, group)
    return translated


def _of_group(event: KVCEvent, group: GroupName) -> list[KVCacheEvent]:
    match event:
        case Insert(_, tier):
            return _stored(event, tier, group)
        case Delete(fact, tier):
            return _removed(fact, tier, group)
        case Copy(_, _, target_tier):
            return _stored(event, target_tier, group)
        case Move(fact, source_tier, target_tier, shared_blocks):
            left = msgspec.structs.replace(fact, shared_blocks=shared_blocks)
            return _stored(event, target_tier, group) + _removed(left, source_tier, group)


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


def _stored(event: Insert | Copy | Move, tier: str, group: GroupName) -> list[KVCacheEvent]:
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
            token_ids=list(event.token_ids[fact.shared_blocks * group.block_tokens :]),
            block_size=group.block_tokens,
            lora_id=None,
            medium=name.medium,
            lora_name=event.lora_name,
            extra_keys=_extra_keys(event),
            group_idx=group.number,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.window_tokens,
            locality=name.locality,
            ownership=name.ownership,
        )
    ]


def _removed(fact: ObjectFact, tier: str, group: GroupName) -> list[KVCacheEvent]:
    hashes = _own_hashes(fact)
    if not hashes:
        return []
    name = tier_name(tier)
    return [
        BlockRemoved(
            block_hashes=hashes,
            medium=name.medium,
            group_idx=group.number,
            locality=name.locality,
            ownership=name.ownership,
        )
    ]


def _extra_keys(event: Insert | Copy | Move) -> list[tuple[Any, ...] | None] | None:
    """Adapter, inputs and salt of the event's own blocks: without them equal tokens look equal."""
    own = event.extra_keys[event.fact.shared_blocks :]
    return [keys or None for keys in own] if any(own) else None
