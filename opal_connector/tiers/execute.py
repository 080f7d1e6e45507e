"""Runs jobs against tiers: the "execute" of plan, execute, commit. No lock, no decision."""

import logging
import time
from collections.abc import Sequence

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.base import ChecksumMismatchError, PagedBlocks, TierStore
from opal_connector.transfers import FailureKind, JobResult, LoadJob, ObjectTransfer, StoreJob

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)


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

    A load stops at its first failure.
    """
    outcome = PartOutcome()
    for position, item in enumerate(objects, start=first):
        began = time.perf_counter()
        try:
            tier = tiers[item.tier]
            moved_bytes = (tier.read if is_load else tier.write)(item, paged, after)
        except ChecksumMismatchError as error:
            outcome.failed[position] = FailureKind.CHECKSUM
            warnings.warn("checksum", "a stored object is damaged and is dropped: %s", error)
        except Exception as error:  # noqa: BLE001 - any fault of a tier is a miss, never a crash
            outcome.failed[position] = FailureKind.IO
            verb = "load from" if is_load else "store to"
            warnings.warn("io", "cannot %s tier %d: %r", verb, item.tier, error)
        else:
            before_bytes, before_seconds = outcome.moved.get(item.tier, (0, 0.0))
            seconds = time.perf_counter() - began
            outcome.moved[item.tier] = (before_bytes + moved_bytes, before_seconds + seconds)
            continue
        if is_load:
            break
    return outcome


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
