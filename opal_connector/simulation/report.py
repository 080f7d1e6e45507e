"""What a replay found, complete enough to be written as JSON."""

from collections.abc import Sequence

import msgspec

CACHE_MISS = "Cache Miss"
DEVICE = "apc"  # Opal's name for the device's own prefix cache


class TierReport(msgspec.Struct, kw_only=True):
    """One tier's part.

    Attributes:
        hit_tokens: Prompt tokens that it brought.
        hit_rate: Of all prompt tokens.
        mean_tokens_per_request: Brought, over all requests.
        capacity_bytes: Its limit.
        used_bytes: In use at the end.
        objects: Chunks in it at the end.
        read_bytes: Read from it, for requests and for copies.
        written_bytes: Written to it.
        written_objects: Chunks written to it.
        writes_per_unique_chunk: Those, per different chunk of the trace.
        evictions: Chunks that had to go for others.
    """

    hit_tokens: int = 0
    hit_rate: float = 0.0
    mean_tokens_per_request: float = 0.0
    capacity_bytes: int = 0
    used_bytes: int = 0
    objects: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    written_objects: int = 0
    writes_per_unique_chunk: float = 0.0
    evictions: int = 0


class ReplayReport(msgspec.Struct, kw_only=True):
    """One replay of one trace under one policy.

    `tier_tokens` are tokens by where they came from; they sum to `input_tokens`. Times are of the
    simulation; `replay_seconds` is what the replay itself took.

    Attributes:
        policy: The name that the caller gave.
        requests: Requests served.
        input_tokens: Tokens of all prompts.
        output_tokens: Tokens of all answers.
        unique_chunks: Different chunks of the prompts.
        duration_seconds: From the first arrival to the last thing that happened.
        tier_tokens: The breakdown, the cache misses last.
        hit_rate: Share of the prompts that some cache brought.
        tiers: What every tier did.
        events: How many of every kind.
        dropped_stores: Stores not made, by reason.
        ttft_seconds: Until the first token, per request: mean, median, p95, p99.
        hit_rate_windows: The hit rate of equal parts of the trace, in order.
        replay_seconds: Wall time.
    """

    policy: str
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unique_chunks: int = 0
    duration_seconds: float = 0.0
    tier_tokens: dict[str, int] = {}
    hit_rate: float = 0.0
    tiers: dict[str, TierReport] = {}
    events: dict[str, int] = {}
    dropped_stores: dict[str, int] = {}
    ttft_seconds: dict[str, float] = {}
    hit_rate_windows: list[float] = []
    replay_seconds: float = 0.0


_WINDOWS = 50


def window_rates(hit_tokens: Sequence[int], input_tokens: Sequence[int]) -> list[float]:
    """The hit rate of at most 50 equal parts of the requests."""
    size = max(1, -(-len(hit_tokens) // _WINDOWS))
    return [
        round(sum(hit_tokens[first : first + size]) / sum(input_tokens[first : first + size]), 6)
        for first in range(0, len(hit_tokens), size)
    ]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 95th and 99th percentile; nothing of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "median": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))],
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
    }
