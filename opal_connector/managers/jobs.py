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
    """One object of a job: where it is, and what to say about it when the job ends.

    Attributes:
        tier: The tier's place in the order.
        record: Its entry there.
        tokens: Tokens that a load brings.
        first_block: Where a stored object begins in its sequence.
        token_ids: The tokens of a stored object, if events are wanted.
    """

    __slots__ = ("first_block", "record", "tier", "token_ids", "tokens")

    def __init__(
        self, *, tier: int, record: ObjectRecord, tokens: int = 0, first_block: int = 0
    ) -> None:
        self.tier = tier
        self.record = record
        self.tokens = tokens
        self.first_block = first_block
        self.token_ids: tuple[int, ...] = ()


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
