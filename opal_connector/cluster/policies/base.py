"""What a policy is asked and what it answers. Policies do no I/O and read no clock."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from opal_connector.cluster.loads import WorkerLoad
from opal_connector.cluster.request import WorkerMatch

_NO_MATCH = WorkerMatch(0, 0)


class Candidate(msgspec.Struct, frozen=True):
    """A worker that could serve a request.

    `match` is what it has of the prompt. `prefill_tokens_per_second` and, by tier,
    `fetch_seconds_per_token` are what it measured; None and absent where it has not yet.
    `device_usage` is the part of its KV blocks in use.
    """

    worker_id: str
    match: WorkerMatch = _NO_MATCH
    load: WorkerLoad = WorkerLoad()
    prefill_tokens_per_second: float | None = None
    fetch_seconds_per_token: dict[str, float] = {}
    device_usage: float = 0.0


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """What it would cost to serve a request at one worker, in seconds until its first token.

    `evenness_seconds` is no time of this request: it is what the next ones lose when one worker is
    given more than its share.
    """

    queue_seconds: float = 0.0
    fetch_seconds: float = 0.0
    compute_seconds: float = 0.0
    decode_seconds: float = 0.0
    evenness_seconds: float = 0.0

    @property
    def first_token_seconds(self) -> float:
        """What the request itself would wait."""
        return self.queue_seconds + self.fetch_seconds + self.compute_seconds + self.decode_seconds

    def weighted_seconds(self, work_weight: float) -> float:
        """All of it, with the work that is done for this request alone weighed."""
        work_seconds = self.fetch_seconds + self.compute_seconds
        others_seconds = self.queue_seconds + self.decode_seconds + self.evenness_seconds
        return work_weight * work_seconds + others_seconds


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes, and why: costs by worker where the policy knows any."""

    worker_id: str
    costs: dict[str, CostTerms] = {}


class Policy(Protocol):
    """Chooses one of several workers."""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:
        """The worker for a prompt of so many tokens; there is at least one candidate."""
