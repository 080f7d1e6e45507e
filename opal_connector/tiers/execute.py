"""Runs jobs against tiers: the "execute" of plan, execute, commit. No lock, no decision."""

import logging
import time
from collections.abc import Sequence

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.base import ChecksumMismatchError, PagedBlocks, TierStore
from opal_connector.transfers import FailureKind, JobResult, LoadJob, ObjectTransfer, StoreJob

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_BATCH_ROWS = 64


class PartOutcome:
    """What became of the objects of one part of a job."""

    __slots__ = ("failed", "moved")

    def __init__(self) -> None:
        self.failed: dict[int, FailureKind] = {}
        self.moved: dict[int, tuple[int, float]] = {}


def execute_part(
    *,
    objects: Sequence[ObjectTransfer],
    first: int,
    is_load: bool,
    tiers: Sequence[TierStore],
    paged: PagedBlocks,
    after: object,
) -> PartOutcome:
    """Move `objects`, which stand at `first` and after in their job. Blocks; raises nothing.

    Objects go in batches, because a call costs more than a small object. When a batch fails, its
    objects are tried one by one, so that only those that fail count as failed. A load stops at its
    first failure.
    """
    outcome = PartOutcome()
    for begin, batch in _batches(objects):
        error = _attempt(outcome, merge(batch), is_load, tiers, paged, after)
        if error is None:
            continue
        for position, item in enumerate(batch, start=first + begin):
            if len(batch) > 1:
                error = _attempt(outcome, item, is_load, tiers, paged, after)
            if error is not None:
                outcome.failed[position] = _report(error, item, is_load=is_load)
                if is_load:
                    return outcome
    return outcome


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


def _attempt(
    outcome: PartOutcome,
    item: ObjectTransfer,
    is_load: bool,
    tiers: Sequence[TierStore],
    paged: PagedBlocks,
    after: object,
) -> Exception | None:
    began = time.perf_counter()
    try:
        tier = tiers[item.tier]
        moved_bytes = (tier.read if is_load else tier.write)(item, paged, after)
    except Exception as error:  # noqa: BLE001 - any fault of a tier is a miss, never a crash
        return error
    before_bytes, before_seconds = outcome.moved.get(item.tier, (0, 0.0))
    seconds = time.perf_counter() - began
    outcome.moved[item.tier] = (before_bytes + moved_bytes, before_seconds + seconds)
    return None


def _report(error: Exception, item: ObjectTransfer, *, is_load: bool) -> FailureKind:
    if isinstance(error, ChecksumMismatchError):
        warnings.warn("checksum", "a stored object is damaged and is dropped: %s", error)
        return FailureKind.CHECKSUM
    verb = "load from" if is_load else "store to"
    warnings.warn("io", "cannot %s tier %d: %r", verb, item.tier, error)
    return FailureKind.IO


def fold(job: LoadJob | StoreJob, rank: int, outcomes: Sequence[PartOutcome]) -> JobResult:
    """One result from the outcomes of all parts of a job.

    In a load everything behind the first failure counts as failed: it continues no prefix.
    """
    failed: dict[int, FailureKind] = {}
    moved: dict[int, tuple[int, float]] = {}
    for outcome in outcomes:
        failed.update(outcome.failed)
        for tier, (part_bytes, part_seconds) in outcome.moved.items():
            before_bytes, before_seconds = moved.get(tier, (0, 0.0))
            moved[tier] = (before_bytes + part_bytes, before_seconds + part_seconds)
    if isinstance(job, LoadJob) and failed:
        for position in range(min(failed), len(job.objects)):
            failed.setdefault(position, FailureKind.AFTER_FAILURE)
    return JobResult(job.job_id, rank, failed, moved)


def execute_job(
    job: LoadJob | StoreJob,
    *,
    tiers: Sequence[TierStore],
    paged: PagedBlocks,
    rank: int = 0,
) -> JobResult:
    """Run a whole job in the calling thread. Blocks; raises nothing."""
    outcome = execute_part(
        objects=job.objects,
        first=0,
        is_load=isinstance(job, LoadJob),
        tiers=tiers,
        paged=paged,
        after=paged.ready_mark(),
    )
    return fold(job, rank, [outcome])
