"""Books over memory and tiers of files, and what their jobs do to a world without bytes.

A row or a file of this world holds the hashes of the blocks that were put there.
"""

from collections.abc import Sequence

from fakes import BLOCK_TOKENS, ROW_BYTES

from opal_connector.events import EventLog
from opal_connector.eviction import LRUPolicy
from opal_connector.keys import HASH_BYTES, AttentionGroup, OpalTokenDatabase, plain_layout
from opal_connector.managers import (
    FileSpace,
    FullAttentionManager,
    OpalKVCacheManager,
    OpalStorageBackend,
    OpalStorageManager,
    Space,
    TierPool,
    Unitary,
)
from opal_connector.managers.placement import TierRules
from opal_connector.managers.watermarks import TierLimits
from opal_connector.transfers import (
    CopyJob,
    DropJob,
    FailureKind,
    InventoryPage,
    JobBatch,
    JobResult,
    LoadJob,
    ObjectCopy,
    ObjectName,
    StoreJob,
)

TIERS = ("memory", "near", "far")
HEADER_BYTES = 8
Job = LoadJob | StoreJob | CopyJob | DropJob


def file_bytes(blocks: int, members: int = 1) -> int:
    """The size of a file in this world."""
    return HEADER_BYTES + blocks * members * ROW_BYTES


def hashes_of(run: bytes) -> list[bytes]:
    """The blocks of a run."""
    return [run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES)]


def tiered_manager(
    *,
    memory_blocks: int,
    file_tier_bytes: Sequence[int],
    writes: Sequence[str],
    chunk_blocks: int = 1,
    ranks: int = 1,
    admission: str = "always",
    eviction_threshold: float = 0.95,
) -> OpalKVCacheManager:
    """Books over memory and tiers of files of these sizes and write modes; events are on."""
    log = EventLog(enabled=True)
    spaces: list[Space] = [TierPool(capacity_rows=memory_blocks, row_bytes=ROW_BYTES)]
    spaces += [FileSpace(capacity_bytes=size, file_bytes=file_bytes) for size in file_tier_bytes]
    storage = OpalStorageManager(
        [
            OpalStorageBackend(
                tier=name,
                space=space,
                policy=LRUPolicy(),
                log=log,
                limits=TierLimits(
                    threshold=eviction_threshold, evicts_ahead="demote" in writes[place:]
                ),
            )
            for place, (name, space) in enumerate(zip(TIERS, spaces, strict=False))
        ],
        log,
    )
    single_type = FullAttentionManager(
        attention=AttentionGroup(block_tokens=BLOCK_TOKENS),
        chunk_tokens=chunk_blocks * BLOCK_TOKENS,
        save_unfull_chunk=True,
    )
    return OpalKVCacheManager(
        database=OpalTokenDatabase(block_tokens=BLOCK_TOKENS, chunk_blocks=chunk_blocks),
        storage=storage,
        coordinator=Unitary(storage, [single_type], plain_layout(BLOCK_TOKENS)),
        rules=[
            TierRules(write="off", admission="always"),
            *(TierRules(write=write, admission=admission) for write in writes),
        ],
        ranks=ranks,
    )


class Rank:
    """What one worker has: rows by number, files by name. Damaged ones hold something else."""

    def __init__(self) -> None:
        self.rows: dict[int, bytes] = {}
        self.files: dict[int, dict[ObjectName, bool]] = {1: {}, 2: {}}  # place: name: is whole
        self.lost: dict[int, set[ObjectName]] = {1: set(), 2: set()}  # by others than the books

    def write(self, place: int, name: ObjectName) -> None:
        self.files[place][name] = True
        self.lost[place].discard(name)


class Ticket:
    """One rank's copy of a job, to be executed once."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank


class World:
    """All workers, and the jobs that they have been given.

    Mutable state: the ranks, the jobs not executed (`tickets`), the results not booked, and what
    loads left in memory and have not reported (`late`).
    """

    def __init__(self, ranks: int = 1) -> None:
        self.ranks = [Rank() for _ in range(ranks)]
        self.forget()

    def forget(self) -> None:
        """All processes end: only files stay."""
        for rank in self.ranks:
            rank.rows.clear()
        self.tickets: list[Ticket] = []
        self.results: list[JobResult] = []
        self.late: list[tuple[LoadJob, int, dict[int, FailureKind]]] = []

    @property
    def is_idle(self) -> bool:
        """Whether every job has been booked."""
        return not (self.tickets or self.results or self.late)

    def hand_over(self, jobs: Job | JobBatch | None) -> None:
        """Give every rank its copy of the jobs."""
        if isinstance(jobs, JobBatch):
            every: Sequence[Job] = (*jobs.loads, *jobs.stores, *jobs.copies, *jobs.drops)
        else:
            every = () if jobs is None else (jobs,)
        self.tickets += [Ticket(job, rank) for job in every for rank in range(len(self.ranks))]

    def pages(self, place: int, rank: int, foreign_bytes: int = 0) -> list[InventoryPage]:
        """What a rank finds in a tier of files when it opens it, in two pages."""
        names = [name for name, is_whole in self.ranks[rank].files[place].items() if is_whole]
        # What has no readable header is no object, and is deleted by whoever opens the tier.
        self.ranks[rank].files[place] = dict.fromkeys(names, True)
        half = len(names) // 2
        return [
            InventoryPage(place, rank, tuple(names[:half])),
            InventoryPage(
                place, rank, tuple(names[half:]), is_last=True, foreign_bytes=foreign_bytes
            ),
        ]

    def end_late_copies(self, count: int) -> None:
        """What loads left in memory is reported on its own."""
        for job, rank, kept in self.late[:count]:
            self.results.append(JobResult(job.kept_job_id, rank, kept))
        del self.late[:count]

    def work(self, fault: FailureKind | None = None, faulty: int = 0) -> None:
        """Execute all jobs, first come, first served; an object of each may fail."""
        while self.tickets:
            self.run(self.tickets.pop(0), fault, faulty)
        self.end_late_copies(len(self.late))

    def run(self, ticket: Ticket, fault: FailureKind | None, faulty: int) -> None:
        """Do one rank's work of a job; the object at `faulty` fails so."""
        rank = self.ranks[ticket.rank]
        failed: dict[int, FailureKind] = {}
        match ticket.job:
            case LoadJob() as job:
                kept = self.load(job, rank, fault, faulty, failed)
                if job.kept_job_id:
                    self.late.append((job, ticket.rank, kept))
            case StoreJob() as job:
                self.store(job, rank, fault, faulty, failed)
            case CopyJob() as job:
                self.copy(job, rank, fault, faulty, failed)
            case DropJob() as job:
                self.drop(job, rank, fault, faulty, failed)
        self.results.append(JobResult(ticket.job.job_id, ticket.rank, failed))

    def store(
        self,
        job: StoreJob,
        rank: Rank,
        fault: FailureKind | None,
        faulty: int,
        failed: dict[int, FailureKind],
    ) -> None:
        """Put the blocks of a job where they belong."""
        for position, item in enumerate(job.objects):
            if fault is not None and position == faulty:
                failed[position] = fault
            elif item.tier:
                assert item.name is not None
                rank.write(item.tier, item.name)
            else:
                rank.rows.update(zip(item.tier_rows, hashes_of(item.stamps), strict=True))

    def copy(
        self,
        job: CopyJob,
        rank: Rank,
        fault: FailureKind | None,
        faulty: int,
        failed: dict[int, FailureKind],
    ) -> None:
        """Write what the sources hold."""
        for position, item in enumerate(job.objects):
            failure = fault if position == faulty else None
            failure = failure or self.source_fault(item, rank)
            if failure is not None:
                failed[position] = failure
            else:
                rank.write(item.target_tier, item.name)

    def drop(
        self,
        job: DropJob,
        rank: Rank,
        fault: FailureKind | None,
        faulty: int,
        failed: dict[int, FailureKind],
    ) -> None:
        """Delete files, or all of them."""
        if job.is_wipe:
            if fault is None:
                rank.files[job.tier].clear()
            else:
                failed.update(dict.fromkeys(range(max(1, job.object_count)), fault))
            return
        for position, name in enumerate(job.names):
            if fault is not None and position == faulty:
                failed[position] = fault
            else:
                rank.files[job.tier].pop(name, None)

    def load(
        self,
        job: LoadJob,
        rank: Rank,
        fault: FailureKind | None,
        faulty: int,
        failed: dict[int, FailureKind],
    ) -> dict[int, FailureKind]:
        """Check what a load finds; returns the failures of what it leaves in memory."""
        kept: dict[int, FailureKind] = {}
        for position, item in enumerate(job.objects):
            failure = fault if position == faulty else None
            if item.tier == 0:
                rows = [rank.rows.get(row) for row in item.tier_rows]
                assert rows == hashes_of(item.stamps), "rows were given away under a load"
            elif failure is None:
                assert item.name is not None
                blocks = hashes_of(item.name.run)
                assert [blocks[row] for row in item.tier_rows] == hashes_of(item.stamps)
                failure = self.file_fault(rank, item.tier, item.name)
            if failure is not None:
                failed[position] = failure
            if item.kept_rows:
                # A load that was given up may still fill what it was to keep.
                if failure in (None, FailureKind.TIMEOUT):
                    assert item.name is not None
                    rank.rows.update(zip(item.kept_rows, hashes_of(item.name.run), strict=True))
                else:
                    kept[position] = failure
                    rank.rows.update(dict.fromkeys(item.kept_rows, b"half"))
        if failed:
            for position in range(min(failed), len(job.objects)):
                failed.setdefault(position, FailureKind.AFTER_FAILURE)
        return kept

    def file_fault(self, rank: Rank, place: int, name: ObjectName) -> FailureKind | None:
        is_whole = rank.files[place].get(name)
        if is_whole is None:
            return FailureKind.GONE
        return None if is_whole else FailureKind.CHECKSUM

    def source_fault(self, copy: ObjectCopy, rank: Rank) -> FailureKind | None:
        if copy.source_tier:
            return self.file_fault(rank, copy.source_tier, copy.name)
        rows = [rank.rows.get(row) for row in copy.source_rows]
        assert rows == hashes_of(copy.name.run), "rows were given away under a copy"
        return None
