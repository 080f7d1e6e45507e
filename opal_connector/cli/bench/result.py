"""What a benchmark found: every request as it was, and what the instances say of it."""

from itertools import pairwise
from typing import Any

import msgspec


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request. It succeeded where `error` is empty; times count from when it was sent.

    Attributes:
        conversation_id: Of the workload.
        turn: Its place in the conversation, from 0.
        phase: The part of the workload that it belongs to.
        due_seconds: When it should have been sent, from the benchmark's start.
        sent_seconds: When it was sent, from the benchmark's start.
        latency_seconds: Until the answer, or the attempt, was over.
        token_seconds: When the pieces of the answer came; engines send one a token.
        error: What kind of failure it was.
        error_detail: What was said about it.
        http_status: The answer's, None where none came.
        prompt_tokens: As the endpoint counted them, else as they were sent; None if nobody knows.
        cached_tokens: Prompt tokens that came from a cache, None where the endpoint does not say.
        output_tokens: Generated tokens.
        is_usage_reported: Whether the endpoint counted the tokens.
        output_text: The answer.
        finish_reason: Why it ended.
        worker: The instance that a router chose, by its header `x-opal-worker`.
    """

    conversation_id: str
    turn: int
    phase: str = ""
    due_seconds: float = 0.0
    sent_seconds: float = 0.0
    latency_seconds: float = 0.0
    token_seconds: list[float] = []
    error: str = ""
    error_detail: str = ""
    http_status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    is_usage_reported: bool = False
    output_text: str = ""
    finish_reason: str | None = None
    worker: str | None = None

    @property
    def is_success(self) -> bool:
        """Whether the answer came whole."""
        return not self.error

    @property
    def ttft_seconds(self) -> float | None:
        """From sending to the first token, None without one."""
        return self.token_seconds[0] if self.token_seconds else None

    @property
    def tpot_seconds(self) -> float | None:
        """The mean time of the tokens after the first, None where there are none."""
        if self.output_tokens < 2 or len(self.token_seconds) < 2:
            return None
        return (self.token_seconds[-1] - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def inter_token_seconds(self) -> list[float]:
        """From every piece to the next."""
        times = self.token_seconds
        return [later - sooner for sooner, later in pairwise(times)]

    @property
    def end_seconds(self) -> float:
        """When it was over, from the benchmark's start."""
        return self.sent_seconds + self.latency_seconds


class BenchResult(msgspec.Struct, kw_only=True):
    """One run of one workload against one endpoint.

    Attributes:
        workload: Its kind.
        settings: Its parameters.
        url: The endpoint's server.
        endpoint: The path that was asked.
        model: The model that was asked for.
        duration_seconds: From the first request's sending to the last answer's end.
        requests: All that were sent, in the order of their end.
        not_sent: Turns that came too late: one before them in their conversation failed.
        is_stopped: Whether it ended before the workload did.
        cut_off: Requests that were under way then; they are no records.
        tier_tokens: Prompt tokens of the successful requests by where they came from, the cache
            misses last; None where that is not known.
        client_cpu_seconds: What this process itself spent.
        notes: What could not be known, and why.
    """

    workload: str
    settings: dict[str, Any]
    url: str
    endpoint: str
    model: str
    duration_seconds: float = 0.0
    requests: list[RequestRecord] = []
    not_sent: int = 0
    is_stopped: bool = False
    cut_off: int = 0
    tier_tokens: dict[str, int] | None = None
    client_cpu_seconds: float = 0.0
    notes: list[str] = []

    @property
    def successes(self) -> list[RequestRecord]:
        """The requests that were answered whole."""
        return [record for record in self.requests if record.is_success]
