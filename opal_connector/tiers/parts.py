"""A slice of a job for one thread, and what became of it."""

import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.file_errors import (
    AbandonedError,
    NoSpaceError,
    ObjectGoneError,
    RefusedError,
    SourceError,
)
from opal_connector.transfers import FailureKind, ObjectName

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)


class PartOutcome:
    """What became of the objects of one part of a job."""

    __slots__ = ("failed", "moved")

    def __init__(self) -> None:
        self.failed: dict[int, FailureKind] = {}
        self.moved: dict[int, tuple[int, float]] = {}

    def add_moved(self, tier: int, moved_bytes: int, seconds: float) -> None:
        """Count bytes that were really moved."""
        before_bytes, before_seconds = self.moved.get(tier, (0, 0.0))
        self.moved[tier] = (before_bytes + moved_bytes, before_seconds + seconds)


def failed_outcome(positions: Sequence[int], kind: FailureKind) -> PartOutcome:
    """All of a part failed for one reason."""
    outcome = PartOutcome()
    outcome.failed = dict.fromkeys(positions, kind)
    return outcome


class PartState(Enum):
    """Where a part is."""

    QUEUED = auto()
    RUNNING = auto()  # may hang in the medium; can be given up
    DELIVERING = auto()  # touches what others see; ends by itself, soon
    GIVEN_UP = auto()  # answered as failed; its thread has not returned
    DONE = auto()


class Part:
    """A slice of a job's objects.

    Attributes:
        positions: Of its objects in the job.
        is_urgent: Whether somebody waits for it: a load.
        needs_space: Whether it makes the tier fuller: a store or a copy.
        expires: Whether it is given up in the queue, too: something else is held for it.
        writes: The objects whose files it may publish.
        deletes: The objects whose files it removes.
        is_wipe: Whether it removes every file.
        run: Does the work in the calling thread; raises nothing.
        deadline: Monotonic seconds at which it is given up.
        kept_job_id: The job of the copies that its load leaves in memory; 0 for none.
        has_kept: Whether that copy is complete.

    Mutable state: `state`, `deadline` and `began`, guarded by the lane's lock; `has_kept`, of the
    thread that runs the part.
    """

    __slots__ = (
        "began",
        "deadline",
        "deletes",
        "expires",
        "has_kept",
        "is_urgent",
        "is_wipe",
        "job_id",
        "kept_job_id",
        "needs_space",
        "positions",
        "run",
        "state",
        "writes",
    )

    def __init__(
        self,
        job_id: int,
        positions: Sequence[int],
        run: Callable[["Part"], PartOutcome],
        *,
        is_urgent: bool = False,
        needs_space: bool = False,
        expires: bool = False,
    ) -> None:
        self.job_id = job_id
        self.positions = positions
        self.run = run
        self.is_urgent = is_urgent
        self.needs_space = needs_space
        self.expires = expires
        self.writes: frozenset[ObjectName] = frozenset()
        self.deletes: frozenset[ObjectName] = frozenset()
        self.is_wipe = False
        self.state = PartState.QUEUED
        self.deadline = float("inf")
        self.began = 0.0
        self.kept_job_id = 0
        self.has_kept = False

    @property
    def is_deletion(self) -> bool:
        """Whether it removes files. Nobody waits for that, and it must not end unseen."""
        return self.is_wipe or bool(self.deletes)


def attempt(
    outcome: PartOutcome, position: int, tier: int, verb: str, move: Callable[[], int]
) -> Exception | None:
    """Move one object and note what became of it; returns the error, raises nothing. Blocks."""
    began = time.perf_counter()
    try:
        moved_bytes = move()
    except Exception as error:  # noqa: BLE001 - any fault of a tier is a miss, never a crash
        outcome.failed[position] = report(error, tier, verb)
        return error
    outcome.add_moved(tier, moved_bytes, time.perf_counter() - began)
    return None


def report(error: Exception, tier: int, verb: str) -> FailureKind:
    """What kind of failure an error is; says it, at most once a minute per kind."""
    if isinstance(error, RefusedError):
        return FailureKind.DROPPED
    if isinstance(error, AbandonedError):
        return FailureKind.TIMEOUT
    if isinstance(error, ChecksumMismatchError):
        warnings.warn("checksum", "a stored object is damaged and is dropped: %s", error)
        return FailureKind.CHECKSUM
    if isinstance(error, ObjectGoneError):
        return FailureKind.GONE
    if isinstance(error, SourceError):
        warnings.warn("source", "cannot %s tier %d: %s", verb, tier, error)
        return FailureKind.UNREADABLE
    if isinstance(error, NoSpaceError):
        warnings.warn("space", "tier %d is full, stores are shed until there is space", tier)
        return FailureKind.NO_SPACE
    warnings.warn("io", "cannot %s tier %d: %r", verb, tier, error)
    return FailureKind.IO
