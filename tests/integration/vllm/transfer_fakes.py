"""Transfers that a test controls: jobs that run when it says so, tiers that fail or wait."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from opal_connector.keys import HASH_BYTES
from opal_connector.tiers import (
    InlineMover,
    Job,
    LaneSettings,
    Mover,
    PagedBlocks,
    Tier,
    TierStore,
)
from opal_connector.transfers import (
    InventoryPage,
    JobResult,
    LoadJob,
    ObjectTransfer,
    StoreJob,
    TierHealth,
)


class ManualMover:
    """Keeps the contract of `Mover`, but runs a job only when told to, in the calling thread.

    With `is_inline` every job runs when it is submitted.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        paged: PagedBlocks,
        *,
        rank: int,
        lanes: Sequence[LaneSettings],
        cpus: frozenset[int] | None = None,
        is_inline: bool = False,
    ) -> None:
        del lanes, cpus
        self.tiers = tuple(tiers)
        self.paged = paged
        self.is_inline = is_inline
        self.pending: list[Job] = []
        self.health = tuple(TierHealth.OK for _ in self.tiers)
        self._inline = InlineMover(self.tiers, paged, rank=rank)
        self._results: list[tuple[Job | None, JobResult]] = []
        self._pages: list[InventoryPage] = []

    def open(self, namespace: bytes) -> None:
        self._pages += self._inline.open(namespace)

    def take_pages(self) -> list[InventoryPage]:
        taken, self._pages = self._pages, []
        return taken

    def touch(self, touches: dict[int, tuple[bytes, ...]]) -> None:
        self._inline.touch(touches)

    def wait_for_result(self, timeout_seconds: float) -> None:
        del timeout_seconds

    def submit(self, job: Job) -> None:
        self.pending.append(job)
        if self.is_inline:
            self.run([job])

    def refuse(self, job: Job | None, result: JobResult) -> None:
        self._results.append((job, result))

    def take_results(self) -> list[tuple[Job | None, JobResult]]:
        taken, self._results = self._results, []
        return taken

    @property
    def open_job_count(self) -> int:
        return len(self.pending)

    def close(self, timeout_seconds: float = 5.0) -> bool:
        self.pending.clear()
        return True

    @property
    def pending_loads(self) -> list[LoadJob]:
        return [job for job in self.pending if isinstance(job, LoadJob)]

    @property
    def pending_stores(self) -> list[StoreJob]:
        return [job for job in self.pending if isinstance(job, StoreJob)]

    def run(self, jobs: Sequence[Job] | None = None) -> int:
        """Run these pending jobs, or all; returns how many there were."""
        chosen = list(self.pending if jobs is None else jobs)
        for job in chosen:
            self.pending.remove(job)
            result, *kept = self._inline.run(job)
            self._results.append((job, result))
            self._results += [(None, other) for other in kept]
        return len(chosen)

    def run_loads(self) -> int:
        return self.run(self.pending_loads)

    def run_stores(self) -> int:
        return self.run(self.pending_stores)


class WatchedMover(Mover):
    """The real threads, with an event that is set whenever a job has ended."""

    def __init__(self, *args: object, moved: threading.Event, **kwargs: object) -> None:
        self._moved = moved
        super().__init__(*args, **kwargs)

    def _answer(self, part: object, outcome: object) -> None:
        super()._answer(part, outcome)
        self._moved.set()


class WrappedTier(TierStore):
    """Delegates to a tier. Subclasses add one behaviour."""

    def __init__(self, tier: TierStore) -> None:
        self.tier = tier
        self.name = tier.name

    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        return self.tier.write(item, paged, after)

    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        return self.tier.read(item, paged, after)

    def close(self) -> None:
        self.tier.close()


class FailingTier(WrappedTier):
    """Raises for objects that hold a block of `bad_hashes`, or when a predicate says so."""

    def __init__(self, tier: TierStore) -> None:
        super().__init__(tier)
        self.bad_hashes: set[bytes] = set()
        self.fails_read: Callable[[ObjectTransfer], bool] = lambda item: False
        self.fails_write: Callable[[ObjectTransfer], bool] = lambda item: False
        self.error: Callable[[], Exception] = lambda: OSError(5, "Input/output error")

    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        if self.fails_write(item):
            raise self.error()
        return self.tier.write(item, paged, after)

    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        if self.fails_read(item) or self.bad_hashes & set(block_hashes(item)):
            raise self.error()
        return self.tier.read(item, paged, after)


class GatedTier(WrappedTier):
    """Waits for `gate` before every transfer."""

    def __init__(self, tier: TierStore) -> None:
        super().__init__(tier)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def write(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self._wait()
        return self.tier.write(item, paged, after)

    def read(self, item: ObjectTransfer, paged: PagedBlocks, after: object) -> int:
        self._wait()
        return self.tier.read(item, paged, after)

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(30), "the test forgot to open the gate"


def block_hashes(item: ObjectTransfer) -> list[bytes]:
    """The hashes of the blocks of a transfer."""
    return [
        item.stamps[start : start + HASH_BYTES] for start in range(0, len(item.stamps), HASH_BYTES)
    ]


def flip_bit(rows: np.ndarray, row: int, *, byte: int) -> None:
    """Damage one stored row."""
    rows[row, byte] ^= 1
