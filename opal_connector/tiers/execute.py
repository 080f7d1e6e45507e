"""The work of parts and of whole jobs: the "execute" of plan, execute, commit. No decision."""

from collections.abc import Callable, Sequence

from opal_connector.tiers.base import PagedBlocks, TierStore
from opal_connector.tiers.file_errors import AbandonedError
from opal_connector.tiers.file_moves import (
    Staging,
    Tier,
    copy_object,
    load_object,
    store_object,
)
from opal_connector.tiers.keyed_tier import KeyedTier, always
from opal_connector.tiers.parts import PartOutcome, attempt
from opal_connector.transfers import (
    CopyJob,
    DropJob,
    FailureKind,
    JobResult,
    LoadJob,
    ObjectCopy,
    ObjectTransfer,
    StoreJob,
)

Job = LoadJob | StoreJob | CopyJob | DropJob
Ask = Callable[[], bool]

_BATCH_ROWS = 64


def execute_part(
    *,
    objects: Sequence[ObjectTransfer],
    first: int,
    is_load: bool,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
) -> PartOutcome:
    """Move `objects` of memory tiers, which stand at `first` and after in their job. Blocks.

    Objects go in batches, because a call costs more than a small object. When a batch fails, its
    objects are tried one by one, so that only those that fail count as failed. A load stops at its
    first failure. Raises nothing.
    """
    outcome = PartOutcome()
    for begin, batch in _batches(objects):
        trial = PartOutcome()
        if _move_rows(trial, first + begin, merge(batch), is_load, tiers, paged, after) is None:
            _absorb(outcome, trial)
            continue
        if len(batch) == 1:
            _absorb(outcome, trial)
            if is_load:
                return outcome
            continue
        for position, item in enumerate(batch, start=first + begin):
            error = _move_rows(outcome, position, item, is_load, tiers, paged, after)
            if error is not None and is_load:
                return outcome
    return outcome


def load_file(
    item: ObjectTransfer,
    position: int,
    *,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
    staging: Staging,
    may_deliver: Ask = always,
) -> tuple[PartOutcome, FailureKind | None]:
    """Load one object from a file; also says why its copy in memory failed. Blocks."""
    outcome = PartOutcome()
    error = attempt(
        outcome,
        position,
        item.tier,
        "load from",
        lambda: load_object(item, tiers, paged, after, staging, may_deliver=may_deliver),
    )
    # A load that was given up has filled the rows that it was to keep.
    is_kept = error is None or isinstance(error, AbandonedError)
    return outcome, None if is_kept else outcome.failed[position]


def store_file(
    item: ObjectTransfer,
    position: int,
    *,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
    staging: Staging,
    may_publish: Ask = always,
) -> PartOutcome:
    """Store one object to a file. Blocks."""
    outcome = PartOutcome()
    attempt(
        outcome,
        position,
        item.tier,
        "store to",
        lambda: store_object(item, tiers, paged, after, staging, may_publish=may_publish),
    )
    return outcome


def copy_file(
    item: ObjectCopy,
    position: int,
    *,
    tiers: Sequence[Tier],
    staging: Staging,
    may_publish: Ask = always,
) -> PartOutcome:
    """Copy one object to a file. Blocks."""
    outcome = PartOutcome()
    attempt(
        outcome,
        position,
        item.target_tier,
        "copy to",
        lambda: copy_object(item, tiers, staging, may_publish=may_publish),
    )
    return outcome


def drop_files(job: DropJob, positions: Sequence[int], tiers: Sequence[Tier]) -> PartOutcome:
    """Delete files; a wipe stands for all of its positions. Blocks."""
    outcome = PartOutcome()
    tier = tiers[job.tier]
    assert isinstance(tier, KeyedTier)
    if job.is_wipe:
        error = attempt(outcome, 0, job.tier, "empty", lambda: _nothing_moved(tier.wipe))
        if error is not None:
            outcome.failed = dict.fromkeys(positions, outcome.failed[0])
        outcome.moved.clear()
        return outcome
    for position in positions:
        name = job.names[position]
        attempt(
            outcome,
            position,
            job.tier,
            "delete from",
            lambda name=name: _nothing_moved(lambda: tier.remove_object(name)),  # type: ignore[misc]
        )
    outcome.moved.clear()
    return outcome


def _nothing_moved(call: Callable[[], None]) -> int:
    call()
    return 0


def merge(items: Sequence[ObjectTransfer]) -> ObjectTransfer:
    """Several objects of one tier and group as one transfer."""
    if len(items) == 1:
        return items[0]
    return ObjectTransfer(
        tier=items[0].tier,
        group=items[0].group,
        tier_rows=tuple(row for item in items for row in item.tier_rows),
        block_ids=tuple(block_id for item in items for block_id in item.block_ids),
        stamps=b"".join(item.stamps for item in items),
    )


def fold(
    job_id: int, rank: int, outcomes: Sequence[PartOutcome], *, in_order: int | None = None
) -> JobResult:
    """One result from the outcomes of all parts of a job.

    With `in_order`, the number of objects, everything behind the first failure counts as failed:
    it continues no prefix.
    """
    whole = PartOutcome()
    for outcome in outcomes:
        _absorb(whole, outcome)
    if in_order is not None and whole.failed:
        for position in range(min(whole.failed), in_order):
            whole.failed.setdefault(position, FailureKind.AFTER_FAILURE)
    return JobResult(job_id, rank, whole.failed, whole.moved)


def execute_job(
    job: LoadJob | StoreJob,
    *,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    rank: int = 0,
) -> JobResult:
    """Run a whole job over memory tiers in the calling thread. Blocks; raises nothing."""
    is_load = isinstance(job, LoadJob)
    outcome = execute_part(
        objects=job.objects,
        first=0,
        is_load=is_load,
        tiers=tiers,
        paged=paged,
        after=paged.ready_mark(),
    )
    in_order = len(job.objects) if is_load else None
    return fold(job.job_id, rank, [outcome], in_order=in_order)


def _absorb(whole: PartOutcome, part: PartOutcome) -> None:
    whole.failed.update(part.failed)
    for tier, (moved_bytes, seconds) in part.moved.items():
        whole.add_moved(tier, moved_bytes, seconds)


def _batches(objects: Sequence[ObjectTransfer]) -> list[tuple[int, Sequence[ObjectTransfer]]]:
    """Neighbours of one tier and group with about `_BATCH_ROWS` rows, and where they begin."""
    batches: list[tuple[int, Sequence[ObjectTransfer]]] = []
    begin = rows = 0
    for position, item in enumerate(objects):
        start = objects[begin]
        is_other = (item.tier, item.group) != (start.tier, start.group)
        if position > begin and (is_other or rows + len(item.tier_rows) > _BATCH_ROWS):
            batches.append((begin, objects[begin:position]))
            begin, rows = position, 0
        rows += len(item.tier_rows)
    if begin < len(objects):
        batches.append((begin, objects[begin:]))
    return batches


def _move_rows(
    outcome: PartOutcome,
    position: int,
    item: ObjectTransfer,
    is_load: bool,
    tiers: Sequence[Tier],
    paged: PagedBlocks,
    after: object,
) -> Exception | None:
    def move() -> int:
        tier = tiers[item.tier]
        assert isinstance(tier, TierStore)
        return (tier.read if is_load else tier.write)(item, paged, after)

    return attempt(outcome, position, item.tier, "load from" if is_load else "store to", move)
