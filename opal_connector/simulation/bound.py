"""The replay of a trace under the policy that knows the future."""

import time
from collections.abc import Callable

from opal_connector.simulation.belady import Belady
from opal_connector.simulation.report import CACHE_MISS, ReplayReport, TierReport, window_rates
from opal_connector.simulation.settings import ReplaySettings
from opal_connector.simulation.trace import Trace

BELADY = "Belady"


def replay_belady(
    trace: Trace, settings: ReplaySettings, advance: Callable[[float], None] = lambda _count: None
) -> ReplayReport:
    """What could be hit at best with the room of all tiers and the device together.

    One request after the other, and no tier, job or device: it is a bound, not a simulation.
    """
    began = time.perf_counter()
    row_bytes = settings.bytes_per_token * trace.block_tokens
    capacity_bytes = sum(settings.capacity_bytes(name) for name in settings.config.kvc_tiers)
    usable = [trace.usable_blocks(request) for request in trace.requests]
    bound = Belady(
        [request.hashes for request in trace.requests],
        settings.device_blocks + capacity_bytes // row_bytes,
        usable,
    )
    hit_tokens = []
    for request in trace.requests:
        hit_tokens.append(bound.request(request.hashes) * trace.block_tokens)
        advance(1)
    total = sum(hit_tokens)
    input_tokens = trace.input_tokens
    return ReplayReport(
        policy=BELADY,
        requests=len(trace.requests),
        input_tokens=input_tokens,
        output_tokens=sum(request.output_tokens for request in trace.requests),
        unique_chunks=len({key for request in trace.requests for key in request.hashes}),
        tier_tokens={BELADY: total, CACHE_MISS: input_tokens - total},
        hit_rate=total / input_tokens,
        tiers={
            BELADY: TierReport(
                hit_tokens=total,
                hit_rate=total / input_tokens,
                mean_tokens_per_request=total / len(trace.requests),
                capacity_bytes=capacity_bytes + settings.device_blocks * row_bytes,
            )
        },
        hit_rate_windows=window_rates(
            hit_tokens, [request.input_tokens for request in trace.requests]
        ),
        replay_seconds=time.perf_counter() - began,
    )
