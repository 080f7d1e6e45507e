"""Transfer threads: loads before stores, results collected for whoever polls."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Sequence

from opal_connector.tiers.base import PagedBlocks, TierStore
from opal_connector.tiers.execute import PartOutcome, execute_part, fold
from opal_connector.transfers import JobResult, LoadJob, ObjectTransfer, StoreJob

Job = LoadJob | StoreJob


class _Part:
    """A slice of a job's objects, for one thread."""

    __slots__ = ("after", "first", "job", "objects")

    def __init__(
        self, job: Job, first: int, objects: Sequence[ObjectTransfer], after: object
    ) -> None:
        self.job = job
        self.first = first
        self.objects = objects
        self.after = after


class Mover:
    """Runs jobs in `threads` threads and keeps their results until they are taken.

    Mutable state: the two queues of parts, the outcomes of jobs whose parts are not all done, and
    the results; guarded by `_wake`'s lock. Nothing is copied under it.
    """

    def __init__(
        self,
        tiers: Sequence[TierStore],
        paged: PagedBlocks,
        *,
        rank: int,
        threads: int,
        cpus: frozenset[int] | None = None,
    ) -> None:
        self._tiers = tuple(tiers)
        self._paged = paged
        self._rank = rank
        self._wake = threading.Condition()
        self._loads: deque[_Part] = deque()
        self._stores: deque[_Part] = deque()
        self._outcomes: dict[int, list[PartOutcome]] = {}
        self._parts_left: dict[int, int] = {}
        self._results: list[tuple[Job, JobResult]] = []
        self._is_closing = False
        self._cpus = cpus
        self._threads = [
            threading.Thread(target=self._run, name=f"opal-mover-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Does not block; its source or destination must stay until the result."""
        after = self._paged.ready_mark()
        parts = [
            _Part(job, first, job.objects[first:stop], after)
            for first, stop in _slices(job.objects, len(self._threads))
        ]
        with self._wake:
            if not parts:
                self._results.append((job, fold(job, self._rank, [])))
                return
            self._parts_left[job.job_id] = len(parts)
            self._outcomes[job.job_id] = []
            (self._loads if isinstance(job, LoadJob) else self._stores).extend(parts)
            self._wake.notify(len(parts))

    def refuse(self, job: Job, result: JobResult) -> None:
        """Report a job that could not be submitted."""
        with self._wake:
            self._results.append((job, result))

    def take_results(self) -> list[tuple[Job, JobResult]]:
        """Jobs that ended since the last call, with their results."""
        if not self._results:
            return []
        with self._wake:
            taken, self._results = self._results, []
        return taken

    @property
    def open_job_count(self) -> int:
        """Jobs that have not ended."""
        return len(self._parts_left)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        """Stop after the parts that are running; queued ones are dropped.

        Returns:
            Whether every thread ended in time. One that is stuck in a tier is left behind: it is
            a daemon and touches nothing that anybody still reads.
        """
        with self._wake:
            self._is_closing = True
            self._loads.clear()
            self._stores.clear()
            self._wake.notify_all()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._cpus:
            # Cores that were taken away meanwhile: the thread works where it is.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self._cpus)
        while True:
            with self._wake:
                while not (self._loads or self._stores or self._is_closing):
                    self._wake.wait()
                if self._is_closing:
                    return
                part = (self._loads or self._stores).popleft()
            outcome = execute_part(
                objects=part.objects,
                first=part.first,
                is_load=isinstance(part.job, LoadJob),
                tiers=self._tiers,
                paged=self._paged,
                after=part.after,
            )
            self._end_part(part.job, outcome)

    def _end_part(self, job: Job, outcome: PartOutcome) -> None:
        with self._wake:
            outcomes = self._outcomes[job.job_id]
            outcomes.append(outcome)
            self._parts_left[job.job_id] -= 1
            if self._parts_left[job.job_id]:
                return
            del self._parts_left[job.job_id]
            del self._outcomes[job.job_id]
            self._results.append((job, fold(job, self._rank, outcomes)))


def _slices(objects: Sequence[ObjectTransfer], count: int) -> list[tuple[int, int]]:
    """At most `count` adjoining ranges of `objects` with about equally many rows each."""
    total = sum(len(item.tier_rows) for item in objects)
    slices: list[tuple[int, int]] = []
    first = rows = 0
    for position, item in enumerate(objects, start=1):
        rows += len(item.tier_rows)
        if rows * count >= total * (len(slices) + 1):
            slices.append((first, position))
            first = position
    return slices
