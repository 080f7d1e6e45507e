"""What the simulation of a cluster found, complete enough to be written as JSON."""

import statistics
from collections.abc import Sequence

import msgspec

from opal_connector.simulation import TierReport


class EventTraffic(msgspec.Struct, kw_only=True):
    """What the instances told the router.

    Attributes:
        batches: Messages with events.
        events: Facts in them, the device's included.
        bytes: Of those messages as they are encoded, without the frames of the transport.
        bytes_per_request: Those, over all requests.
        heartbeats: Messages that all instances send in the duration, computed.
        heartbeat_bytes: Their size, each as large as that of its instance at the end.
    """

    batches: int = 0
    events: int = 0
    bytes: int = 0
    bytes_per_request: float = 0.0
    heartbeats: int = 0
    heartbeat_bytes: int = 0


class RouterReport(msgspec.Struct, kw_only=True):
    """What the router needed.

    Attributes:
        index_bytes: Most memory of the KVBM, as it counts its blocks and segments itself.
        index_blocks: Most distinct blocks in it.
        expected_hit_rate: Share of the prompts that it expected to be cached where it sent them.
        decide_seconds: Wall time of all decisions.
        ingest_seconds: Wall time of taking in all events.
    """

    index_bytes: int = 0
    index_blocks: int = 0
    expected_hit_rate: float = 0.0
    decide_seconds: float = 0.0
    ingest_seconds: float = 0.0


class BalanceReport(msgspec.Struct, kw_only=True):
    """How even the load was, over all instances.

    Attributes:
        imbalance: Tokens that the busiest instance computed, over the mean; 1 is even.
        deviation: Standard deviation of those tokens, over the mean.
        requests_most: Requests of the instance that was given most.
        requests_least: And least.
        idle_instances: Instances that were given none.
    """

    imbalance: float = 1.0
    deviation: float = 0.0
    requests_most: int = 0
    requests_least: int = 0
    idle_instances: int = 0


class ClusterReport(msgspec.Struct, kw_only=True):
    """One run of one trace by so many instances under one policy.

    Fields of the same name are those of `ReplayReport`, summed over the instances. Capacities are
    of all instances; a tier that all of them share counts once.

    Attributes:
        instances: How many.
        policy: Of the router.
        is_shared: Whether all instances mount one directory.
        requests: Requests served.
        input_tokens: Tokens of all prompts.
        output_tokens: Tokens of all answers.
        unique_chunks: Different chunks of the prompts.
        duration_seconds: From the first arrival to the last thing that happened, in virtual time.
        tier_tokens: Tokens by where they came from, the cache misses last.
        hit_rate: Share of the prompts that some cache brought.
        tiers: What every tier did.
        events: How many of every kind, of the tiers.
        dropped_stores: Stores not made, by reason.
        ttft_seconds: Until the first token, per request: mean, median, p95, p99.
        hit_rate_windows: The hit rate of equal parts of the trace, in order.
        balance: How even the load was.
        traffic: What the instances told the router.
        router: What the router needed.
        wall_seconds: What the run took.
        requests_per_wall_second: How fast the simulation itself is.
    """

    instances: int
    policy: str
    is_shared: bool
    requests: int
    input_tokens: int
    output_tokens: int
    unique_chunks: int
    duration_seconds: float
    tier_tokens: dict[str, int]
    hit_rate: float
    tiers: dict[str, TierReport]
    events: dict[str, int]
    dropped_stores: dict[str, int]
    ttft_seconds: dict[str, float]
    hit_rate_windows: list[float]
    balance: BalanceReport
    traffic: EventTraffic
    router: RouterReport
    wall_seconds: float
    requests_per_wall_second: float


def balance(computed_tokens: Sequence[int], requests: Sequence[int]) -> BalanceReport:
    """Compare what the instances were given; those that were given nothing are 0 in both."""
    mean = statistics.fmean(computed_tokens)
    return BalanceReport(
        imbalance=max(computed_tokens) / mean if mean else 1.0,
        deviation=statistics.pstdev(computed_tokens) / mean if mean else 0.0,
        requests_most=max(requests),
        requests_least=min(requests),
        idle_instances=sum(not count for count in requests),
    )
