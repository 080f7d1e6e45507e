"""The worker of a replay: takes the books' jobs, lets time pass for them, and answers. No bytes."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.device import SimulatedDevice
from opal_connector.transfers import CopyJob, DropJob, JobResult, LoadJob, StoreJob

Operations = Counter[tuple[int, int]]  # (tier's place, blocks of the operation) -> how many


class Traffic(msgspec.Struct):
    """What went in and out of one tier. Mutable state: all of it."""

    read_bytes: int = 0
    written_bytes: int = 0
    written_objects: int = 0


class SimulatedWorker:
    """Does jobs on simulated devices, one per tier.

    A load reads its tiers at the same time, then writes what is to be kept; a copy reads, then
    writes. Nothing fails.

    Mutable state: `traffic`, per tier.
    """

    def __init__(
        self,
        devices: Sequence[SimulatedDevice],
        *,
        clock: VirtualClock,
        row_bytes: int,
        commit: Callable[[JobResult], None],
    ) -> None:
        self.traffic = [Traffic() for _ in devices]
        self._devices = devices
        self._clock = clock
        self._row_bytes = row_bytes
        self._commit = commit

    def load(self, job: LoadJob, done: Callable[[], None]) -> None:
        """Read what a request waits for; `done` follows the commit."""
        reads: Operations = Counter()
        kept: Operations = Counter()
        for item in job.objects:
            reads[item.tier, len(item.kept_rows) or len(item.block_ids)] += 1
            if item.kept_rows:
                kept[item.kept_tier, len(item.kept_rows)] += 1

        def end(moved: dict[int, tuple[int, float]]) -> None:
            self._commit(JobResult(job.job_id, 0, moved=moved))
            if job.kept_job_id:
                self._write(kept, job.kept_job_id)
            done()

        self._read(reads, end)

    def store(self, job: StoreJob) -> None:
        """Write what a request has computed."""
        self._write(Counter((item.tier, len(item.tier_rows)) for item in job.objects), job.job_id)

    def copy(self, job: CopyJob) -> None:
        """Bring objects from tier to tier."""
        reads = Counter((item.source_tier, len(item.source_rows)) for item in job.objects)
        writes = Counter((item.target_tier, len(item.target_rows)) for item in job.objects)
        self._read(reads, lambda _moved: self._write(writes, job.job_id))

    def drop(self, job: DropJob) -> None:
        """Delete files: an operation without bytes each."""
        self._run(
            Counter({(job.tier, 0): job.object_count}),
            lambda _moved: self._commit(JobResult(job.job_id, 0)),
        )

    def _read(
        self, operations: Operations, end: Callable[[dict[int, tuple[int, float]]], None]
    ) -> None:
        for (place, blocks), count in operations.items():
            self.traffic[place].read_bytes += count * blocks * self._row_bytes
        self._run(operations, end)

    def _write(self, operations: Operations, job_id: int) -> None:
        for (place, blocks), count in operations.items():
            self.traffic[place].written_bytes += count * blocks * self._row_bytes
            self.traffic[place].written_objects += count
        self._run(operations, lambda moved: self._commit(JobResult(job_id, 0, moved=moved)))

    def _run(
        self, operations: Operations, end: Callable[[dict[int, tuple[int, float]]], None]
    ) -> None:
        """Have all operations done, then say what was moved, and in how many seconds, by tier."""
        began = self._clock.now
        moved: dict[int, tuple[int, float]] = {}
        left = sum(1 for count in operations.values() if count)
        if not left:
            self._clock.plan(0.0, lambda: end({}))
            return

        def part_done(place: int, size_bytes: int) -> None:
            nonlocal left
            known = moved.get(place, (0, 0.0))[0]
            moved[place] = (known + size_bytes, self._clock.now - began)
            left -= 1
            if not left:
                end(moved)

        for (place, blocks), count in operations.items():
            if count:
                size_bytes = blocks * self._row_bytes
                self._devices[place].submit(
                    count, size_bytes, _bound(part_done, place, count * size_bytes)
                )


def _bound(call: Callable[[int, int], None], place: int, size_bytes: int) -> Callable[[], None]:
    return lambda: call(place, size_bytes)
