"""From leases and specs to the objects of a job. Called by the manager, under its lock."""

from collections.abc import Sequence

from opal_connector.keys import HASH_BYTES, RequestIdentity, engine_extra_keys
from opal_connector.managers.coordinator import HitPlan
from opal_connector.managers.counters import add
from opal_connector.managers.jobs import PlannedCopy, PlannedObject
from opal_connector.managers.records import ObjectRecord, ObjectSpec
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.single_type import Segment
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectName, ObjectTransfer

IN_FLIGHT = "in_flight"  # so many blocks are being stored that the rest has to wait


class JobDraft:
    """The objects of a job being planned: what the worker gets, and what the books keep.

    Attributes:
        transfers: For the worker.
        planned: For the books, at the same positions.
        kept: Copies that a load leaves in the first tier.
    """

    __slots__ = ("kept", "planned", "transfers")

    def __init__(self) -> None:
        self.transfers: list[ObjectTransfer] = []
        self.planned: list[PlannedObject] = []
        self.kept: dict[int, PlannedCopy] = {}


class StoreDraft(JobDraft):
    """A store being planned.

    Attributes:
        drop_reason: Why the rest was not planned, None if everything was.
        next_chunk: The first whole chunk that is neither stored nor being stored.
        stored_blocks: Where the stored beginning of the sequence ends.
    """

    __slots__ = ("drop_reason", "next_chunk", "stored_blocks")

    def __init__(self, next_chunk: int) -> None:
        super().__init__()
        self.drop_reason: str | None = None
        self.next_chunk = next_chunk
        self.stored_blocks = 0


def before_any_load(plan: HitPlan) -> tuple[Segment, ...]:
    """The segments before the first one that somebody loads now: no object is loaded twice."""
    for position, segment in enumerate(plan.segments):
        if segment.record.loads:
            return plan.segments[:position]
    return plan.segments


def tier_tokens(
    segments: Sequence[Segment], tier_names: Sequence[str], block_tokens: int
) -> dict[str, int]:
    """Tokens of `segments` by the tier that they come from."""
    tokens: dict[str, int] = {}
    for segment in segments:
        add(tokens, tier_names[segment.tier], segment.block_count * block_tokens)
    return tokens


def draft_load(
    segments: Sequence[Segment],
    block_ids: Sequence[int],
    storage: OpalStorageManager,
    block_tokens: int,
) -> JobDraft:
    """Fill `block_ids` from `segments`, in order, as far as they reach; pins what it uses.

    What comes from files is kept in the first tier where that has room, unless the load needs only
    a small part of it.
    """
    draft = JobDraft()
    covered = 0
    for segment in segments:
        count = min(segment.block_count, len(block_ids) - covered)
        if count <= 0:
            break
        destinations = tuple(block_ids[covered : covered + count])
        storage.tiers[segment.tier].pin(segment.record, loading=True)
        kept = _keep(segment, count, storage)
        if kept is not None:
            draft.kept[len(draft.planned)] = kept
        transfer = _load_transfer(segment, count, destinations, storage, kept)
        draft.transfers.append(transfer)
        draft.planned.append(
            PlannedObject(tier=segment.tier, record=segment.record, tokens=count * block_tokens)
        )
        covered += count
    return draft


def draft_store(
    specs: Sequence[ObjectSpec],
    *,
    block_ids: Sequence[int],
    storage: OpalStorageManager,
    chunk_blocks: int,
    next_chunk: int,
    max_blocks: int,
) -> StoreDraft:
    """Reserve room for `specs`, head first, until one is refused or `max_blocks` are planned.

    What follows a refused chunk is not stored either: nothing could reach it.
    """
    draft = StoreDraft(next_chunk)
    for spec in specs:
        if spec.block_count > max_blocks:
            draft.drop_reason = IN_FLIGHT
            break
        outcome = storage.reserve(spec)
        if not isinstance(outcome, Refusal):
            place, record = outcome
            max_blocks -= spec.block_count
            draft.transfers.append(_store_transfer(spec, place, record, block_ids, storage))
            draft.planned.append(
                PlannedObject(tier=place, record=record, first_block=spec.first_block)
            )
        elif outcome is not Refusal.PRESENT:
            draft.drop_reason = outcome.value
            break
        draft.stored_blocks = spec.first_block + spec.block_count
        if spec.block_count == chunk_blocks:
            draft.next_chunk = draft.stored_blocks // chunk_blocks
    return draft


def describe_stores(
    planned: Sequence[PlannedObject],
    identity: RequestIdentity,
    tokens: Sequence[int],
    block_tokens: int,
) -> None:
    """Note what events will say of stored objects, where somebody hashes them himself."""
    for item in planned:
        blocks = len(item.record.rows)
        start = item.first_block * block_tokens
        item.token_ids = tuple(tokens[start : start + blocks * block_tokens])
        item.extra_keys = engine_extra_keys(
            identity, first_block=item.first_block, block_count=blocks, block_tokens=block_tokens
        )


def _keep(segment: Segment, count: int, storage: OpalStorageManager) -> PlannedCopy | None:
    """Room in the first tier for an object that is about to be read from a slower one."""
    record = segment.record
    first = storage.tiers[0]
    if segment.tier == 0 or first.space.frees_later or 2 * count < len(record.rows):
        return None
    outcome = first.reserve(
        ObjectSpec(record.group, record.parent_hash, record.run, 0, record.owner)
    )
    if isinstance(outcome, Refusal):
        return None  # all of it is in use: the load goes past it
    outcome.describe_as(record)
    return PlannedCopy(source_tier=segment.tier, source=None, target_tier=0, target=outcome)


def _name(record: ObjectRecord, place: int, storage: OpalStorageManager) -> ObjectName | None:
    """What a tier of files has to know of an object; rows of memory need no name."""
    if not storage.tiers[place].space.frees_later:
        return None
    return ObjectName(record.group, record.parent_hash, record.run)


def _load_transfer(
    segment: Segment,
    count: int,
    destinations: tuple[int, ...],
    storage: OpalStorageManager,
    kept: PlannedCopy | None,
) -> ObjectTransfer:
    start, stop = segment.object_offset, segment.object_offset + count
    return ObjectTransfer(
        tier=segment.tier,
        group=segment.record.group,
        tier_rows=segment.record.rows[start:stop],
        block_ids=destinations,
        stamps=segment.record.run[start * HASH_BYTES : stop * HASH_BYTES],
        name=_name(segment.record, segment.tier, storage),
        kept_tier=kept.target_tier if kept is not None else -1,
        kept_rows=kept.target.rows if kept is not None else (),
    )


def _store_transfer(
    spec: ObjectSpec,
    place: int,
    record: ObjectRecord,
    block_ids: Sequence[int],
    storage: OpalStorageManager,
) -> ObjectTransfer:
    stop = spec.first_block + spec.block_count
    return ObjectTransfer(
        tier=place,
        group=spec.group,
        tier_rows=record.rows,
        block_ids=tuple(block_ids[spec.first_block : stop]),
        stamps=spec.run,
        name=_name(record, place, storage),
    )
