"""Jobs that were planned and have not been answered by every rank."""

from collections.abc import Iterator, Sequence
from enum import Enum, auto

from opal_connector.keys import ExtraKeys
from opal_connector.managers.records import ObjectRecord
from opal_connector.managers.request import OpalRequest
from opal_connector.transfers import FailureKind, JobResult


class JobKind(Enum):
    """What a job does."""

    LOAD = auto()
    STORE = auto()
    COPY = auto()
    DROP = auto()


class PlannedObject:
    """One object of a load or a store: where it is, and what to say about it when the job ends.

    Attributes:
        tier: The tier's place in the order.
        record: Its entry there.
        tokens: Tokens that a load brings.
        first_block: Where a stored object begins in its sequence.
        token_ids: The tokens of a stored object, if events are wanted.
        extra_keys: What else decides its KV, then.
    """

    __slots__ = ("extra_keys", "first_block", "record", "tier", "token_ids", "tokens")

    def __init__(
        self, *, tier: int, record: ObjectRecord, tokens: int = 0, first_block: int = 0
    ) -> None:
        self.tier = tier
        self.record = record
        self.tokens = tokens
        self.first_block = first_block
        self.token_ids: tuple[int, ...] = ()
        self.extra_keys: tuple[ExtraKeys, ...] = ()


class PlannedCopy:
    """One object on its way from tier to tier.

    Attributes:
        source_tier: Where it is read.
        source: Its entry there, promised to this copy; None where a load's promise covers it.
        target_tier: Where it is written.
        target: Its entry there.
        is_move: Whether the source gives it up in the end.
    """

    __slots__ = ("is_move", "source", "source_tier", "target", "target_tier")

    def __init__(
        self,
        *,
        source_tier: int,
        source: ObjectRecord | None,
        target_tier: int,
        target: ObjectRecord,
        is_move: bool = False,
    ) -> None:
        self.source_tier = source_tier
        self.source = source
        self.target_tier = target_tier
        self.target = target
        self.is_move = is_move


class PlannedDrop:
    """One file to be deleted."""

    __slots__ = ("record", "tier")

    def __init__(self, *, tier: int, record: ObjectRecord) -> None:
        self.tier = tier
        self.record = record


class PlannedWipe:
    """Everything that a tier of files has of the namespace."""

    __slots__ = ("tier",)

    def __init__(self, *, tier: int) -> None:
        self.tier = tier


Planned = PlannedObject | PlannedCopy | PlannedDrop | PlannedWipe


class OpenJob:
    """A job in motion; an object that is None was not asked for.

    Mutable state: the ranks that still owe an answer and what failed so far.
    """

    __slots__ = ("failed", "job_id", "kind", "objects", "ranks_left", "request")

    def __init__(
        self,
        job_id: int,
        kind: JobKind,
        request: OpalRequest | None,
        objects: Sequence[Planned | None],
        ranks: int,
    ) -> None:
        self.job_id = job_id
        self.kind = kind
        self.request = request
        self.objects = objects
        self.ranks_left = ranks
        self.failed: dict[int, FailureKind] = {}

    def answer(self, result: JobResult) -> bool:
        """Take one rank's answer; True when it was the last. One rank's failure is everybody's."""
        for position, kind in result.failed.items():
            known = self.failed.get(position)
            if known is None or known is FailureKind.AFTER_FAILURE:
                self.failed[position] = kind
        self.ranks_left -= 1
        return self.ranks_left == 0


class JobTable:
    """All jobs that some rank has not answered.

    Mutable state: the jobs and the next number; guarded by the lock of `OpalKVCacheManager`.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._next_job_id = 0
        self._jobs: dict[int, OpenJob] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._jobs.values())

    def open(
        self, kind: JobKind, request: OpalRequest | None, objects: Sequence[Planned | None]
    ) -> int:
        """Number a new job."""
        self._next_job_id += 1
        if request is not None:  # to load or to store is to use, once
            request.used.update(
                item.record.key for item in objects if isinstance(item, PlannedObject)
            )
        job = OpenJob(self._next_job_id, kind, request, objects, self._ranks)
        self._jobs[job.job_id] = job
        return job.job_id

    def get(self, job_id: int) -> OpenJob | None:
        """The job of that number, if some rank owes its answer."""
        return self._jobs.get(job_id)

    def close(self, job: OpenJob) -> None:
        """Every rank has answered."""
        del self._jobs[job.job_id]
