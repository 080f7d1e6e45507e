"""Runs jobs in the calling thread: for hosts that have the books in the same process."""

from collections.abc import Iterator, Sequence

from opal_connector.tiers.base import PagedBlocks
from opal_connector.tiers.execute import Job, fold
from opal_connector.tiers.file_moves import Tier
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.part_maker import PartMaker
from opal_connector.tiers.parts import Part
from opal_connector.transfers import FailureKind, InventoryPage, JobResult, LoadJob


class InlineLane:
    """A lane without threads: whoever runs a part delivers it."""

    thread_count = 1

    def begin_delivery(self, part: Part) -> bool:
        """Nobody gives anything up here."""
        del part
        return True

    def note_failure(self) -> None:
        """Nobody keeps count here."""


class InlineMover:
    """Does the work of a `Mover` at once. Blocks as long as the medium does; no deadlines.

    Holds no state; calls may come from several threads, for different jobs.
    """

    def __init__(self, tiers: Sequence[Tier], paged: PagedBlocks, *, rank: int) -> None:
        self._tiers = tuple(tiers)
        self._rank = rank
        self._parts = PartMaker(self._tiers, [InlineLane()] * len(self._tiers), paged)

    def open(self, namespace: bytes) -> Iterator[InventoryPage]:
        """Open the tiers of files and give what they hold. Blocks.

        Raises:
            OSError: A directory cannot be used.
        """
        for place, tier in enumerate(self._tiers):
            if isinstance(tier, KeyedTier):
                for names in tier.open(namespace):
                    yield InventoryPage(place, self._rank, names)
                yield InventoryPage(
                    place, self._rank, is_last=True, foreign_bytes=tier.foreign_bytes
                )

    def run(self, job: Job) -> list[JobResult]:
        """The result of a job, and of the copies that a load leaves behind. Raises nothing."""
        parts = [part for _, part in self._parts.split(job)]
        outcomes = [part.run(part) for part in parts]
        in_order = len(job.objects) if isinstance(job, LoadJob) else None
        results = [fold(job.job_id, self._rank, outcomes, in_order=in_order)]
        if isinstance(job, LoadJob) and job.kept_job_id:
            failed = {
                position: outcome.failed.get(position, FailureKind.MISSING)
                for part, outcome in zip(parts, outcomes, strict=True)
                if not part.has_kept
                for position in part.positions
            }
            results.append(JobResult(job.kept_job_id, self._rank, failed))
        return results

    def touch(self, touches: dict[int, tuple[bytes, ...]]) -> None:
        """Write down uses that must survive a restart."""
        for place, keys in touches.items():
            tier = self._tiers[place]
            if isinstance(tier, KeyedTier):
                tier.touch(keys)
