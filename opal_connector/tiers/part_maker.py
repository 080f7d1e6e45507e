"""From jobs to parts: which slice of a job goes to which tier's threads."""

from collections.abc import Sequence
from typing import Protocol

from opal_connector.tiers.base import PagedBlocks
from opal_connector.tiers.execute import (
    Job,
    copy_file,
    drop_files,
    execute_part,
    load_file,
    store_file,
)
from opal_connector.tiers.file_moves import Staging, Tier
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.parts import Part, PartOutcome
from opal_connector.transfers import (
    CopyJob,
    DropJob,
    FailureKind,
    LoadJob,
    ObjectTransfer,
    StoreJob,
)

_DROPS_A_PART = 64


class Deliveries(Protocol):
    """The threads of a tier, as far as its parts know them."""

    @property
    def thread_count(self) -> int:
        """Slices to make of a job."""

    def begin_delivery(self, part: Part) -> bool:
        """Whether a running part may touch what others see."""

    def note_failure(self) -> None:
        """Something of the tier failed in another tier's thread."""


class PartMaker:
    """Splits jobs. A memory tier's objects go in few large slices, every file is a part.

    Holds no state but the threads' staging buffers.
    """

    def __init__(
        self, tiers: Sequence[Tier], lanes: Sequence[Deliveries], paged: PagedBlocks
    ) -> None:
        self._tiers = tiers
        self._lanes = lanes
        self._paged = paged
        self._staging = Staging()

    def split(self, job: Job) -> list[tuple[int, Part]]:
        """The parts of a job and the tiers whose threads run them; none for an empty job."""
        match job:
            case LoadJob() | StoreJob():
                return self._split_transfers(job)
            case CopyJob():
                return [
                    (item.target_tier, self._copy_part(job, position))
                    for position, item in enumerate(job.objects)
                ]
            case DropJob():
                return self._split_drops(job)

    def _split_drops(self, job: DropJob) -> list[tuple[int, Part]]:
        if job.is_wipe:
            return [(job.tier, self._drop_part(job, range(max(1, job.object_count))))]
        everything = range(len(job.names))
        return [
            (job.tier, self._drop_part(job, everything[first : first + _DROPS_A_PART]))
            for first in range(0, len(job.names), _DROPS_A_PART)
        ]

    def _split_transfers(self, job: LoadJob | StoreJob) -> list[tuple[int, Part]]:
        after = self._paged.ready_mark()
        kept_job_id = job.kept_job_id if isinstance(job, LoadJob) else 0
        work: list[tuple[int, Part]] = []
        for first, stop in _runs_of_one_tier(job.objects):
            place = job.objects[first].tier
            if place < len(self._tiers) and isinstance(self._tiers[place], KeyedTier):
                work += [
                    (place, self._file_part(job, position, after))
                    for position in range(first, stop)
                ]
                continue
            place = min(place, len(self._lanes) - 1)  # an unknown tier fails there
            objects = job.objects[first:stop]
            for begin, end in slices(objects, self._lanes[place].thread_count):
                part = self._rows_part(job, first + begin, objects[begin:end], after)
                work.append((place, part))
        for _, part in work:
            part.kept_job_id = kept_job_id
        return work

    def _rows_part(
        self, job: LoadJob | StoreJob, first: int, objects: Sequence[ObjectTransfer], after: object
    ) -> Part:
        is_load = isinstance(job, LoadJob)

        def run(_: Part) -> PartOutcome:
            return execute_part(
                objects=objects,
                first=first,
                is_load=is_load,
                tiers=self._tiers,
                paged=self._paged,
                after=after,
            )

        positions = range(first, first + len(objects))
        return Part(job.job_id, positions, run, is_urgent=is_load, needs_space=not is_load)

    def _file_part(self, job: LoadJob | StoreJob, position: int, after: object) -> Part:
        item = job.objects[position]
        lane = self._lanes[item.tier]

        def load(part: Part) -> PartOutcome:
            outcome, kept_failure = load_file(
                item,
                position,
                tiers=self._tiers,
                paged=self._paged,
                after=after,
                staging=self._staging,
                may_deliver=lambda: lane.begin_delivery(part),
            )
            if item.kept_rows and kept_failure is None:
                part.has_kept = True
            return outcome

        def store(part: Part) -> PartOutcome:
            return store_file(
                item,
                position,
                tiers=self._tiers,
                paged=self._paged,
                after=after,
                staging=self._staging,
                may_publish=lambda: lane.begin_delivery(part),
            )

        if isinstance(job, LoadJob):
            return Part(job.job_id, (position,), load, is_urgent=True, expires=True)
        part = Part(job.job_id, (position,), store, needs_space=True, expires=True)
        part.writes = frozenset() if item.name is None else frozenset({item.name})
        return part

    def _copy_part(self, job: CopyJob, position: int) -> Part:
        item = job.objects[position]
        lane = self._lanes[item.target_tier]

        def run(part: Part) -> PartOutcome:
            outcome = copy_file(
                item,
                position,
                tiers=self._tiers,
                staging=self._staging,
                may_publish=lambda: lane.begin_delivery(part),
            )
            if FailureKind.UNREADABLE in outcome.failed.values():
                self._lanes[item.source_tier].note_failure()
            return outcome

        part = Part(job.job_id, (position,), run, needs_space=True)
        part.writes = frozenset({item.name})
        return part

    def _drop_part(self, job: DropJob, positions: Sequence[int]) -> Part:
        part = Part(job.job_id, positions, lambda _: drop_files(job, positions, self._tiers))
        part.is_wipe = job.is_wipe
        if not job.is_wipe:
            part.deletes = frozenset(job.names[position] for position in positions)
        return part


def _runs_of_one_tier(objects: Sequence[ObjectTransfer]) -> list[tuple[int, int]]:
    """Adjoining ranges of objects of the same tier."""
    runs: list[tuple[int, int]] = []
    for position, item in enumerate(objects):
        if runs and item.tier == objects[runs[-1][0]].tier:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


def slices(objects: Sequence[ObjectTransfer], count: int) -> list[tuple[int, int]]:
    """At most `count` adjoining ranges of `objects` with about equally many rows each."""
    total = sum(len(item.tier_rows) for item in objects)
    ranges: list[tuple[int, int]] = []
    first = rows = 0
    for position, item in enumerate(objects, start=1):
        rows += len(item.tier_rows)
        if rows * count >= total * (len(ranges) + 1):
            ranges.append((first, position))
            first = position
    return ranges
