"""Jobs that were planned and have not been answered by every rank."""

from enum import Enum, auto

from opal_connector.managers.records import ObjectRecord
from opal_connector.managers.request import OpalRequest
from opal_connector.transfers import FailureKind, JobResult


class JobKind(Enum):
    """Which way the bytes go."""

    LOAD = auto()
    STORE = auto()


class PlannedObject:
    """One object of a job: where it is, and what to say about it when the job ends."""

    __slots__ = ("chunk", "record", "tier", "token_ids", "tokens")

    def __init__(
        self,
        *,
        tier: int,
        record: ObjectRecord,
        tokens: int,
        chunk: int = 0,
        token_ids: tuple[int, ...] = (),
    ) -> None:
        self.tier = tier
        self.record = record
        self.tokens = tokens
        self.chunk = chunk
        self.token_ids = token_ids


class OpenJob:
    """A job in motion. Mutable state: the ranks that still owe an answer and what failed so far."""

    __slots__ = ("failed", "job_id", "kind", "objects", "ranks_left", "request")

    def __init__(
        self,
        job_id: int,
        kind: JobKind,
        request: OpalRequest,
        objects: list[PlannedObject],
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
