"""Which facts are about which tier, and in which tiers two fingerprints differ."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, assert_never

import msgspec

from opal_connector.events.channel import BUCKET_COUNT, TierDigest
from opal_connector.events.digests import differing
from opal_connector.events.facts import Copy, Delete, Insert, KVCEvent, Move

TierKey = tuple[int, str]  # kv group and tier

_NOTHING: Final = bytes(8 * BUCKET_COUNT)
# Contents by bucket name each block with its parent: behind this many the whole tier is shorter.
_WHOLE_FROM_BUCKETS: Final = 64


class Wanted(msgspec.Struct, frozen=True):
    """Contents to be asked for: some buckets of a tier or, empty, all of it."""

    key: TierKey
    buckets: bytes = b""


def events_for(events: Iterable[KVCEvent], is_wanted: Callable[[TierKey], bool]) -> list[KVCEvent]:
    """What the events say about the wanted tiers; a move is cut where it touches one of them."""
    selected: list[KVCEvent] = []
    for event in events:
        group = event.fact.group
        match event:
            case Insert() | Delete():
                if is_wanted((group, event.tier)):
                    selected.append(event)
            case Copy():
                if is_wanted((group, event.target_tier)):
                    selected.append(event)
            case Move():
                selected.extend(_moved(event, is_wanted))
            case _:
                assert_never(event)
    return selected


def _moved(event: Move, is_wanted: Callable[[TierKey], bool]) -> list[KVCEvent]:
    fact = event.fact
    from_source = is_wanted((fact.group, event.source_tier))
    to_target = is_wanted((fact.group, event.target_tier))
    if from_source and to_target:
        return [event]
    if to_target:
        return [Insert(fact, event.target_tier, event.token_ids, event.lora_name)]
    if from_source:
        left = msgspec.structs.replace(fact, shared_blocks=event.source_shared_blocks)
        return [Delete(left, event.source_tier)]
    return []


def by_tier(digests: Iterable[TierDigest]) -> dict[TierKey, TierDigest]:
    """Digests by group and tier."""
    return {(digest.group, digest.tier): digest for digest in digests}


def differences(
    ours: Mapping[TierKey, TierDigest],
    theirs: Mapping[TierKey, TierDigest],
    *,
    with_incomplete: bool,
) -> list[Wanted]:
    """The buckets in which two descriptions of the same tiers differ.

    Args:
        ours: What is known.
        theirs: What the instance says. A tier that it does not mention is taken for empty; its
            contents are asked for all the same, because only their answer tells whether a
            persistent tier is empty or has not been looked through yet.
        with_incomplete: Whether tiers count that are still finding out what they hold. Where they
            do not, such a tier counts only while it holds more blocks than are known: the blocks
            that it has not found yet are no difference.
    """
    wanted = []
    for key in sorted(ours.keys() | theirs.keys()):
        our, their = ours.get(key), theirs.get(key)
        known = our.block_count if our is not None else 0
        is_finding = their is not None and not their.is_complete and their.block_count <= known
        if is_finding and not with_incomplete:
            continue
        buckets = differing(
            our.buckets if our is not None else _NOTHING,
            their.buckets if their is not None else _NOTHING,
        )
        if buckets:
            whole = len(buckets) > _WHOLE_FROM_BUCKETS or known == 0
            wanted.append(Wanted(key, b"" if whole else buckets))
    return wanted
