"""From objects to the parts of jobs. Called by `ObjectBooks`, under its lock."""

from collections.abc import Sequence

from opal_connector.integrations.lmcache.wishes import StoreState
from opal_connector.managers import ObjectRecord, OpalStorageManager, Refusal
from opal_connector.managers.counters import BookCounters, add
from opal_connector.managers.jobs import JobKind, OpenJob, PlannedCopy
from opal_connector.managers.records import ObjectKey
from opal_connector.transfers import JobResult, ObjectTransfer


def transfer_of(
    storage: OpalStorageManager, place: int, record: ObjectRecord, addresses: tuple[int, ...]
) -> ObjectTransfer:
    """An object between a tier and the buffer at these addresses."""
    return ObjectTransfer(
        tier=place,
        group=record.group,
        tier_rows=record.rows,
        block_ids=addresses,
        stamps=storage.name_of(record).stamps,
        name=storage.file_name(record, place),
    )


def keep_copy(storage: OpalStorageManager, place: int, record: ObjectRecord) -> PlannedCopy | None:
    """Room in the first tier for an object that is about to be read from a slower one."""
    first = storage.tiers[0]
    if place == 0 or first.space.frees_later:
        return None
    outcome = first.reserve(record.as_spec())
    if isinstance(outcome, Refusal):
        return None  # all of it is in use: the load goes past it
    return PlannedCopy(source_tier=place, source=None, target_tier=0, target=outcome)


def state_of(refusal: Refusal, *, is_readable: bool, is_opening: bool) -> StoreState:
    """What a refusal means for whoever can wait."""
    if refusal is Refusal.PRESENT:
        return StoreState.PRESENT if is_readable else StoreState.LATER
    if refusal is Refusal.TOO_LARGE or (refusal is Refusal.UNAVAILABLE and not is_opening):
        return StoreState.NEVER
    return StoreState.LATER


def is_loading(storage: OpalStorageManager, keys: Sequence[ObjectKey]) -> bool:
    """Whether a load reads some copy of these objects now."""
    records = (tier.index.records.get(key) for key in keys for tier in storage.tiers)
    return any(record is not None and record.loads for record in records)


def count_moved(
    counters: BookCounters, tier_names: Sequence[str], job: OpenJob, result: JobResult
) -> None:
    """Count the bytes that a job has really moved."""
    counts = counters.load_bytes if job.kind is JobKind.LOAD else counters.store_bytes
    for place, (moved_bytes, _) in result.moved.items():
        add(counts, tier_names[place], moved_bytes)
