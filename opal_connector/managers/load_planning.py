"""From a lease to the objects of a load. Called by the manager, under its lock."""

from collections.abc import Sequence

import msgspec

from opal_connector.keys import HASH_BYTES, AttentionLayout
from opal_connector.managers.block_tables import NO_BLOCK, BlockTables
from opal_connector.managers.counters import add
from opal_connector.managers.drafts import JobDraft
from opal_connector.managers.jobs import PlannedCopy, PlannedObject
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.segments import Segment
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectTransfer, row_stamps


def tier_tokens(segments: Sequence[Segment], tier_names: Sequence[str]) -> dict[str, int]:
    """Tokens of a hit by the tier that they come from."""
    tokens: dict[str, int] = {}
    for segment in segments:
        if segment.hit_tokens:
            add(tokens, tier_names[segment.tier], segment.hit_tokens)
    return tokens


class LoadDraft(JobDraft):
    """A load being planned.

    Attributes:
        missing: Addresses that the host expects filled and the lease does not cover.
    """

    __slots__ = ("missing",)

    def __init__(self) -> None:
        super().__init__()
        self.missing: tuple[int, ...] = ()


def draft_load(
    segments: Sequence[Segment],
    tables: BlockTables,
    storage: OpalStorageManager,
    layout: AttentionLayout,
    *,
    first_token: int,
    stop_token: int,
) -> LoadDraft:
    """Fill the blocks in `[first_token, stop_token)` that the host has; pins what it uses.

    What comes from files is kept in the first tier where that has room, unless the load needs only
    a small part of it.
    """
    draft = LoadDraft()
    covered: set[int] = set()
    for segment in segments:
        attention = layout.groups[segment.record.group]
        count = segment.block_count
        if attention.retention != "input":  # of which all is needed, however short the hit
            stop_block = -(-stop_token // attention.block_tokens)
            count = min(count, stop_block - segment.first_block)
        if count <= 0:
            continue
        addresses = [
            address
            for kv_group in attention.kv_groups
            for address in tables.addresses(
                kv_group, segment.first_block, segment.first_block + count
            )
        ]
        if all(address == NO_BLOCK for address in addresses):
            continue  # the host does not want it
        covered.update(addresses)
        storage.tiers[segment.tier].pin(segment.record, loading=True)
        kept = _keep(segment, count, storage)
        if kept is not None:
            draft.kept[len(draft.planned)] = kept
        draft.transfers.append(_transfer(segment, count, addresses, storage, kept))
        tokens = segment.hit_tokens * count // segment.block_count
        draft.planned.append(PlannedObject(tier=segment.tier, record=segment.record, tokens=tokens))
    draft.missing = tuple(
        address
        for address in _wanted(tables, layout, first_token, stop_token)
        if address not in covered
    )
    return draft


def _wanted(
    tables: BlockTables, layout: AttentionLayout, first_token: int, stop_token: int
) -> list[int]:
    """All addresses in that range; what the host has not allocated it does not want filled."""
    return [
        address
        for attention in layout.groups
        if attention.retention != "input"
        for kv_group in attention.kv_groups
        for address in tables.addresses(
            kv_group,
            first_token // attention.block_tokens,
            -(-stop_token // attention.block_tokens),
        )
        if address != NO_BLOCK
    ]


def _keep(segment: Segment, count: int, storage: OpalStorageManager) -> PlannedCopy | None:
    """Room in the first tier for an object that is about to be read from a slower one."""
    record = segment.record
    first = storage.tiers[0]
    if segment.tier == 0 or first.space.frees_later or 2 * count < record.block_count:
        return None
    # It is used now: whatever was thought of it when it was stored, it is not passing any more.
    outcome = first.reserve(msgspec.structs.replace(record.as_spec(), is_passing=False))
    if isinstance(outcome, Refusal):
        return None  # all of it is in use: the load goes past it
    outcome.describe_as(record)
    return PlannedCopy(source_tier=segment.tier, source=None, target_tier=0, target=outcome)


def _transfer(
    segment: Segment,
    count: int,
    addresses: Sequence[int],
    storage: OpalStorageManager,
    kept: PlannedCopy | None,
) -> ObjectTransfer:
    """One object's part of a load: the rows of the wanted blocks, member by member."""
    record, blocks = segment.record, segment.record.block_count
    members = storage.members(record.group)
    start, stop = segment.object_offset, segment.object_offset + count
    rows = [
        row
        for member in range(members)
        for row in record.rows[member * blocks + start : member * blocks + stop]
    ]
    stamps = row_stamps(record.run[start * HASH_BYTES : stop * HASH_BYTES], members, record.group)
    if NO_BLOCK in addresses:
        wanted = [place for place, address in enumerate(addresses) if address != NO_BLOCK]
        rows = [rows[place] for place in wanted]
        stamps = b"".join(stamps[place * HASH_BYTES : (place + 1) * HASH_BYTES] for place in wanted)
        addresses = [addresses[place] for place in wanted]
    return ObjectTransfer(
        tier=segment.tier,
        group=record.group,
        tier_rows=tuple(rows),
        block_ids=tuple(addresses),
        stamps=stamps,
        name=storage.file_name(record, segment.tier),
        kept_tier=kept.target_tier if kept is not None else -1,
        kept_rows=kept.target.rows if kept is not None else (),
    )
