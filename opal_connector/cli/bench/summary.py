"""The figures of a benchmark, from its records alone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from opal_connector.cli.bench.result import BenchResult, RequestRecord

_BUSY_SHARE: Final = 0.8  # of a core; above, the figures may be the client's


class Spread(msgspec.Struct, frozen=True):
    """How a time was distributed, in milliseconds."""

    mean_ms: float
    median_ms: float
    p99_ms: float


class BenchSummary(msgspec.Struct, kw_only=True):
    """What the table shows; what is None cannot be known, and a note says why.

    Attributes:
        successful_requests: Answered whole.
        failed_requests: All others that were sent.
        errors: Those, by kind.
        not_sent: Turns after a failed one.
        duration_seconds: From the first request's sending to the last answer's end.
        input_tokens: Of the successful requests' prompts.
        output_tokens: Generated for them.
        request_throughput: Successful requests a second.
        output_throughput: Generated tokens a second.
        peak_output_throughput: Of the best second.
        total_throughput: Prompt and generated tokens a second.
        peak_concurrent_requests: The most that were under way at once.
        held_back: How much later than due requests were sent.
        ttft: Time to the first token.
        tpot: Time of an answer's tokens after the first, per request.
        itl: From one piece of an answer to the next.
        phases: Time to the first token by the workload's parts, where it has some.
        requests_by_worker: Of a router's instances.
        tier_tokens: Prompt tokens by where they came from, the misses last.
        notes: What could not be known, and why.
    """

    successful_requests: int
    failed_requests: int
    errors: dict[str, int]
    not_sent: int
    duration_seconds: float
    input_tokens: int | None
    output_tokens: int
    request_throughput: float
    output_throughput: float
    peak_output_throughput: float
    total_throughput: float | None
    peak_concurrent_requests: int
    held_back: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    phases: dict[str, Spread]
    requests_by_worker: dict[str, int]
    tier_tokens: dict[str, int] | None
    notes: list[str]


def summarize(result: BenchResult) -> BenchSummary:
    """The figures of a run; throughput and times are those of the successful requests."""
    answered = result.successes
    seconds = result.duration_seconds or 1.0  # without a request, zeros over anything
    input_tokens = None
    if all(record.prompt_tokens is not None for record in answered):
        input_tokens = sum(record.prompt_tokens or 0 for record in answered)
    output_tokens = sum(record.output_tokens for record in answered)
    errors = Counter(record.error for record in result.requests if record.error)
    return BenchSummary(
        successful_requests=len(answered),
        failed_requests=len(result.requests) - len(answered),
        errors=dict(errors.most_common()),
        not_sent=result.not_sent,
        duration_seconds=result.duration_seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(answered) / seconds,
        output_throughput=output_tokens / seconds,
        peak_output_throughput=peak_per_second(answered),
        total_throughput=None if input_tokens is None else (input_tokens + output_tokens) / seconds,
        peak_concurrent_requests=peak_concurrent(result.requests),
        held_back=spread(one.sent_seconds - one.due_seconds for one in result.requests),
        ttft=spread(one.ttft_seconds for one in answered),
        tpot=spread(one.tpot_seconds for one in answered),
        itl=spread(gap for one in answered for gap in one.inter_token_seconds),
        phases=_phases(answered),
        requests_by_worker=dict(
            sorted(Counter(one.worker for one in answered if one.worker).items())
        ),
        tier_tokens=result.tier_tokens,
        notes=[*result.notes, *_notes(result, answered)],
    )


def spread(seconds: Iterable[float | None]) -> Spread | None:
    """Mean, median and 99th percentile of what is known, None of nothing."""
    ordered = sorted(value for value in seconds if value is not None)
    if not ordered:
        return None
    return Spread(
        1000 * sum(ordered) / len(ordered),
        1000 * percentile(ordered, 0.5),
        1000 * percentile(ordered, 0.99),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest values, as numpy does it."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def peak_concurrent(records: Iterable[RequestRecord]) -> int:
    """The most requests that were under way at one moment, failed ones included."""
    marks = [(one.sent_seconds, 1) for one in records]
    marks += [(one.end_seconds, -1) for one in records]
    most = under_way = 0
    for _, change in sorted(marks):  # at the same moment, what ends goes first
        under_way += change
        most = max(most, under_way)
    return most


def peak_per_second(records: Iterable[RequestRecord]) -> float:
    """Generated tokens of the second, from the start on, that had most."""
    tokens: dict[int, float] = {}
    for record in records:
        for at in record.token_seconds:
            second = int(record.sent_seconds + at)
            # An engine may send several tokens in a piece.
            share = record.output_tokens / len(record.token_seconds)
            tokens[second] = tokens.get(second, 0.0) + share
    return max(tokens.values(), default=0.0)


def _phases(answered: list[RequestRecord]) -> dict[str, Spread]:
    names = dict.fromkeys(record.phase for record in answered if record.phase)
    found = {
        name: spread(one.ttft_seconds for one in answered if one.phase == name) for name in names
    }
    return {name: times for name, times in found.items() if times is not None}


def _notes(result: BenchResult, answered: list[RequestRecord]) -> list[str]:
    notes = []
    if result.is_stopped:
        notes.append(
            f"Stopped early: {result.cut_off} requests were under way, and are in no figure."
        )
    silent = sum(not record.is_usage_reported for record in answered)
    if silent:
        notes.append(
            f"{silent} answers came without usage: their generated tokens are the pieces that "
            "came, and their prompt tokens are known only where token ids were sent."
        )
    empty = sum(not record.token_seconds for record in answered)
    if empty:
        notes.append(f"{empty} answers had no token, and no time to the first one.")
    if answered and all(record.tpot_seconds is None for record in answered):
        notes.append("TPOT and ITL are left out: no answer had a second token.")
    busy = result.client_cpu_seconds / result.duration_seconds if result.duration_seconds else 0.0
    if busy > _BUSY_SHARE:
        notes.append(
            f"This client was busy for {100 * busy:.0f}% of a core: it may be the bottleneck."
        )
    return notes
