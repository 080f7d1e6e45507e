"""What a simulated cluster costs: processor time as the requests, and as the instances, grow.

Chats are made up, of the shape of a recorded trace (`--trace FILE` takes a real one, and its first
parts). One policy, memory of 8 GiB an instance, prefills that queue. Requests grow at a fixed
number of instances, instances grow at a fixed number of requests. Processor time, because the
simulation is one thread and waits for nothing. Books and index are audited in a run of their own
whose time does not count.
"""

import gc
import time
from pathlib import Path
from typing import Any

from common import Figures, OtherLoad, at_most, emit, machine_facts, note, parser

from opal_connector.config import OpalConfig
from opal_connector.simulated_cluster import ClusterReport, ClusterSimulation
from opal_connector.simulation import ReplaySettings, Trace, generated_chats, read_trace

POLICY = "Balanced"
GROWTH = (1, 2, 4)
GROWTH_INSTANCES = 100
SIZES = (1, 10, 100, 1000)
SETTINGS = ReplaySettings(
    config=OpalConfig(),
    prefill_tokens_per_second=20_000,
    decode_tokens_per_second=50,
    prefill_concurrency=1,
)


def first_part(trace: Trace, requests: int) -> Trace:
    """The first so many requests."""
    return Trace(trace.block_tokens, trace.requests[:requests])


def simulated(trace: Trace, instances: int) -> tuple[float, ClusterReport]:
    """Processor seconds of one run, and what it found."""
    cluster = ClusterSimulation(trace, SETTINGS, instances=instances, policy=POLICY)
    gc.collect()
    began = time.process_time()
    report = cluster.run()
    return time.process_time() - began, report


def audit(trace: Trace) -> None:
    """One small run whose books and index are compared at its end."""
    cluster = ClusterSimulation(trace, SETTINGS, instances=10, policy=POLICY)
    cluster.run()
    cluster.check()


def growth_of_requests(trace: Trace, rounds: int) -> Figures:
    """Milliseconds a request at one, two and four times as many, the best of some rounds."""
    count = len(trace.requests) // GROWTH[-1]
    best: dict[int, float] = {}
    for turn in range(rounds):
        for factor in GROWTH:
            note(f"{factor} times {count} requests, round {turn + 1}")
            seconds, _ = simulated(first_part(trace, factor * count), GROWTH_INSTANCES)
            best[factor] = min(best.get(factor, seconds), seconds)
    return {
        f"{factor}x": {
            "requests": factor * count,
            "seconds": round(seconds, 3),
            "ms_a_request": round(1000 * seconds / (factor * count), 4),
        }
        for factor, seconds in best.items()
    }


def growth_of_instances(trace: Trace) -> Figures:
    """The same requests at more and more instances."""
    figures: Figures = {}
    for instances in SIZES:
        note(f"{instances} instances")
        seconds, report = simulated(trace, instances)
        figures[str(instances)] = {
            "seconds": round(seconds, 3),
            "requests_a_second": round(len(trace.requests) / seconds, 1),
            "decide_ms": round(1000 * report.router.decide_seconds / len(trace.requests), 3),
            "hit_rate": round(report.hit_rate, 4),
            "event_bytes_a_request": round(report.traffic.bytes_per_request),
            "index_bytes": report.router.index_bytes,
        }
    return figures


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--trace", type=Path, help="requests of a file instead of made-up ones")
    given = arguments.parse_args()
    facts = machine_facts()
    load = OtherLoad()
    most = 1_000 if given.quick else 8_000
    if given.trace is None:
        trace = generated_chats(1, most, turn_chance=0.4, chats_kept=400)
    else:
        trace = read_trace(given.trace, limit=most)
    audit(first_part(trace, min(300, most)))
    requests = growth_of_requests(trace, rounds=2)
    figures: Figures = {
        "trace": "generated" if given.trace is None else given.trace.name,
        f"requests_at_{GROWTH_INSTANCES}_instances": requests,
        f"instances_at_{len(trace.requests)}_requests": growth_of_instances(trace),
        "cores_used_by_others": round(load.cores(), 2),
    }
    dearest = requests[f"{GROWTH[-1]}x"]["ms_a_request"] / requests["1x"]["ms_a_request"]
    bars: dict[str, Any] = {"cost of a request, at 4 times as many": at_most(dearest, 1.5)}
    statistic = "processor time of one thread; the best of two rounds as requests grow"
    emit(given, facts=facts, statistic=statistic, figures=figures, bars=bars)


if __name__ == "__main__":
    main()
