"""Runs jobs in the threads of their tiers and keeps the results for whoever polls."""

import threading
import time
from collections.abc import Callable, Sequence

from opal_connector.tiers.base import PagedBlocks
from opal_connector.tiers.execute import Job, fold
from opal_connector.tiers.file_moves import Tier
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.lane import Lane
from opal_connector.tiers.part_maker import PartMaker
from opal_connector.tiers.parts import Part, PartOutcome, report
from opal_connector.tiers.tier_watch import TierWatch
from opal_connector.transfers import (
    FailureKind,
    InventoryPage,
    JobResult,
    LoadJob,
    TierHealth,
)

_ERRAND = 0  # no job has this number


class LaneSettings:
    """The threads of one tier, and how long an operation there may take."""

    __slots__ = ("threads", "timeout_seconds")

    def __init__(self, *, threads: int, timeout_seconds: float | None = None) -> None:
        self.threads = threads
        self.timeout_seconds = timeout_seconds


class Mover:
    """Splits jobs into parts, one lane of threads per tier, and folds the outcomes.

    Mutable state: per job the outcomes and the parts that are not answered, per load the copies
    that are not settled, and the results; guarded by `_lock`. Nothing is moved under it.
    `on_result` is called under it when there is something to take, and must not wait.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        paged: PagedBlocks,
        *,
        rank: int,
        lanes: Sequence[LaneSettings],
        cpus: frozenset[int] | None = None,
        on_result: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_result = on_result
        self._tiers = tuple(tiers)
        self._paged = paged
        self._rank = rank
        self._lock = threading.Condition()
        self._jobs: dict[int, Job] = {}
        self._outcomes: dict[int, list[PartOutcome]] = {}
        self._parts_left: dict[int, int] = {}
        self._kept: dict[int, dict[int, FailureKind]] = {}
        self._kept_left: dict[int, int] = {}
        self._results: list[tuple[Job | None, JobResult]] = []
        self._lanes = [
            Lane(
                tier.name,
                threads=settings.threads,
                answer=self._answer,
                returned=self._returned,
                cpus=cpus,
                timeout_seconds=settings.timeout_seconds,
            )
            for tier, settings in zip(self._tiers, lanes, strict=True)
        ]
        self._parts = PartMaker(self._tiers, self._lanes, paged)
        self._watch = TierWatch(self._tiers, self._lanes, rank=rank)

    def open(self, namespace: bytes) -> None:
        """Begin to open the tiers of files; what they hold comes as pages. Does not block."""
        self._watch.open(namespace)

    def submit(self, job: Job) -> None:
        """Queue a job. Does not block; its source or destination must stay until the result."""
        work = self._parts.split(job)
        with self._lock:
            if isinstance(job, LoadJob) and job.kept_job_id:
                self._kept[job.kept_job_id] = {}
                self._kept_left[job.kept_job_id] = len(work)
            if not work:
                self._add_result(job, fold(job.job_id, self._rank, []))
                return
            self._jobs[job.job_id] = job
            self._parts_left[job.job_id] = len(work)
            self._outcomes[job.job_id] = []
        for place, part in work:
            self._lanes[place].submit([part])

    def refuse(self, job: Job | None, result: JobResult) -> None:
        """Report a job that could not be submitted."""
        with self._lock:
            self._add_result(job, result)

    def take_results(self) -> list[tuple[Job | None, JobResult]]:
        """Jobs that ended since the last call, with their results; None for a load's copies."""
        if not self._results:
            return []
        with self._lock:
            taken, self._results = self._results, []
        return taken

    def wait_for_result(self, timeout_seconds: float) -> None:
        """Block until there is a result to take, if a job is in motion, for a bounded time."""
        with self._lock:
            if self._parts_left and not self._results:
                self._lock.wait(timeout_seconds)

    def take_pages(self) -> list[InventoryPage]:
        """What tiers that are being opened hold, since the last call."""
        return self._watch.take_pages()

    def touch(self, touches: dict[int, tuple[bytes, ...]]) -> None:
        """Have uses written down that must survive a restart. Does not block."""
        for place, keys in touches.items():
            tier = self._tiers[place]
            if isinstance(tier, KeyedTier) and self._watch.is_open(place):
                self._lanes[place].submit([_errand(tier, keys)])

    @property
    def health(self) -> tuple[TierHealth, ...]:
        """What every tier can do now, by place."""
        return self._watch.health

    @property
    def open_job_count(self) -> int:
        """Jobs that have not been answered."""
        return len(self._parts_left)

    def close(self, timeout_seconds: float = 4.0) -> bool:
        """Stop after the parts that are running; queued ones are dropped.

        Returns:
            Whether every thread ended in time. One that is stuck in a tier is left behind: it is
            a daemon and touches nothing that anybody still reads.
        """
        deadline = time.monotonic() + timeout_seconds
        threads = [thread for lane in self._lanes for thread in lane.close()]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes:
            lane.abandon()
        closers = self._watch.close()
        for thread in closers:
            thread.join(max(0.1, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in (*threads, *closers))

    # ---- parts to results ----

    def _answer(self, part: Part, outcome: PartOutcome) -> None:
        with self._lock:
            outcomes = self._outcomes.get(part.job_id)
            if outcomes is None:
                return  # an errand: nobody asked
            outcomes.append(outcome)
            self._parts_left[part.job_id] -= 1
            if self._parts_left[part.job_id]:
                return
            job = self._jobs.pop(part.job_id)
            del self._parts_left[part.job_id]
            del self._outcomes[part.job_id]
            in_order = len(job.objects) if isinstance(job, LoadJob) else None
            result = fold(part.job_id, self._rank, outcomes, in_order=in_order)
            self._add_result(job, result)
            self._lock.notify_all()

    def _returned(self, part: Part, outcome: PartOutcome) -> None:
        """A part's thread is out of it, maybe long after it was answered: settle its copies."""
        if not part.kept_job_id:
            return
        with self._lock:
            failed = self._kept[part.kept_job_id]
            if not part.has_kept:
                for position in part.positions:
                    failed[position] = outcome.failed.get(position, FailureKind.MISSING)
            self._kept_left[part.kept_job_id] -= 1
            if self._kept_left[part.kept_job_id]:
                return
            del self._kept_left[part.kept_job_id], self._kept[part.kept_job_id]
            self._add_result(None, JobResult(part.kept_job_id, self._rank, failed))

    def _add_result(self, job: Job | None, result: JobResult) -> None:
        self._results.append((job, result))
        self._on_result()


def _errand(tier: KeyedTier, keys: tuple[bytes, ...]) -> Part:
    """Uses to be written down: a part of no job, that nobody waits for."""

    def run(_: Part) -> PartOutcome:
        outcome = PartOutcome()
        try:
            tier.touch(keys)
        except Exception as error:  # noqa: BLE001 - the order of use is a hint
            outcome.failed[0] = report(error, 0, "note uses in")
        return outcome

    return Part(_ERRAND, (0,), run)
