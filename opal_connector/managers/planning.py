"""From leases and specs to the objects of a job. Called by the manager, under its lock."""

from collections.abc import Sequence

from opal_connector.keys import HASH_BYTES
from opal_connector.managers.coordinator import HitPlan
from opal_connector.managers.jobs import PlannedObject
from opal_connector.managers.records import ObjectRecord, ObjectSpec
from opal_connector.managers.single_type import Segment
from opal_connector.managers.storage_backend import Refusal
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.transfers import ObjectTransfer

IN_FLIGHT = "in_flight"  # so many blocks are being stored that the rest has to wait


class JobDraft:
    """The objects of a job being planned: what the worker gets, and what the books keep."""

    __slots__ = ("planned", "transfers")

    def __init__(self) -> None:
        self.transfers: list[ObjectTransfer] = []
        self.planned: list[PlannedObject] = []


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


def draft_load(
    segments: Sequence[Segment],
    block_ids: Sequence[int],
    storage: OpalStorageManager,
    block_tokens: int,
) -> JobDraft:
    """Fill `block_ids` from `segments`, in order, as far as they reach; pins what it uses."""
    draft = JobDraft()
    covered = 0
    for segment in segments:
        count = min(segment.block_count, len(block_ids) - covered)
        if count <= 0:
            break
        destinations = tuple(block_ids[covered : covered + count])
        draft.transfers.append(_load_transfer(segment, count, destinations))
        draft.planned.append(
            PlannedObject(tier=segment.tier, record=segment.record, tokens=count * block_tokens)
        )
        storage.tiers[segment.tier].pin(segment.record, loading=True)
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
            draft.transfers.append(_store_transfer(spec, place, record, block_ids))
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


def _load_transfer(segment: Segment, count: int, destinations: tuple[int, ...]) -> ObjectTransfer:
    start, stop = segment.object_offset, segment.object_offset + count
    return ObjectTransfer(
        tier=segment.tier,
        group=segment.record.group,
        tier_rows=segment.record.rows[start:stop],
        block_ids=destinations,
        stamps=segment.record.run[start * HASH_BYTES : stop * HASH_BYTES],
    )


def _store_transfer(
    spec: ObjectSpec, place: int, record: ObjectRecord, block_ids: Sequence[int]
) -> ObjectTransfer:
    stop = spec.first_block + spec.block_count
    return ObjectTransfer(
        tier=place,
        group=spec.group,
        tier_rows=record.rows,
        block_ids=tuple(block_ids[spec.first_block : stop]),
        stamps=spec.run,
    )
