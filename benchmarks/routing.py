"""Routing policies on request traces: hits and evenness of four instances, in virtual time.

Every instance is a prefix cache with LRU (the tail of a prompt older than its head), computes one
prompt after the other at a fixed rate, and tells the real KVBM what it stores and evicts when a
prompt is computed. The real policies choose, with the router's own count of what is under way. The
rate is such that four instances without any hit would be busy `BUSY` of the time. Imbalance is the
most tokens that one instance computed, over the mean, to two digits like what it is compared with.
No request carries a session.

Every trace is replayed twice. "One by one" a prompt is computed before the next one comes: so the
figures that the bars ask for were made. "Under load" prompts queue, and what a queue ahead of them
evicts is gone when their turn comes.

Two more workloads are made here: conversations over documents at two instances, and requests that
all begin with the same long prefix. The exit status is 1 if a bar is missed.
"""

import gzip
import heapq
import json
import sys
import tempfile
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    Figures,
    OtherLoad,
    at_least,
    at_most,
    emit,
    machine_facts,
    note,
    parser,
    percentile,
)
from routing_workloads import conversations, one_hot_prefix

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.loads import LoadBook
from opal_connector.cluster.policies import POLICY_NAMES, Candidate, Policy, make_policy
from opal_connector.cluster.predictions import Predictions
from opal_connector.cluster.request import WorkerMatch
from opal_connector.events import DEVICE_TIER, Delete, Insert, ObjectFact
from opal_connector.events.channel import InstanceDescription
from opal_connector.keys import CHAIN_ROOT
from opal_connector.simulation.trace import Trace, TraceRequest, read_trace

TRACES = Path(__file__).parents[2] / "shared/traces"
INSTANCES = 4
BUSY = 0.7
SHARE_BAR = 1.2  # the most that one instance may do of its share in the workloads made here
# Trace, blocks per instance, and what a simple score of prefix and load reaches: hits, imbalance.
COLUMNS: dict[str, tuple[str, int, float, float]] = {
    "conversation": ("mooncake_conversation_trace", 9_139, 0.335, 1.01),
    "conversation, small": ("mooncake_conversation_trace", 2_285, 0.194, 1.01),
    "synthetic": ("mooncake_synthetic_trace", 2_196, 0.387, 1.00),
    "agent": ("claude_code_512", 829, 0.862, 1.05),
    "meetings": ("qmsum_test.hash", 1_611, 0.705, 1.08),
    "magagent": ("lmc_magagent.hash", 402, 0.613, 1.04),
}


class Instance:
    """One instance: its blocks, and the prompts that it was given."""

    def __init__(self, name: str, capacity_blocks: int, kvbm: KVBM) -> None:
        self.name = name
        self.queue: deque[int] = deque()  # request numbers, the one that is computed first
        self.computed_tokens = 0
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._kvbm = kvbm

    def match(self, hashes: Sequence[bytes]) -> int:
        """Blocks from the start that it has."""
        count = 0
        while count < len(hashes) and hashes[count] in self._blocks:
            count += 1
        return count

    def keep(self, hashes: list[bytes]) -> None:
        """A prompt is computed: its blocks are here, the oldest others are not any more."""
        events: list[Any] = []
        parent_hash = CHAIN_ROOT
        for block_hash in hashes:
            if block_hash not in self._blocks:
                events.append(Insert(ObjectFact(0, parent_hash, block_hash), DEVICE_TIER))
            parent_hash = block_hash
        for block_hash in reversed(hashes):
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._capacity:
            evicted, _ = self._blocks.popitem(last=False)
            events.append(Delete(ObjectFact(0, b"", evicted), DEVICE_TIER))
        self._kvbm.process_kvc_events(self.name, events)


class Cluster:
    """Some instances, what a router knows of them, and a policy.

    Without `is_loaded` nobody waits: a prompt is computed before the next one comes.
    """

    def __init__(
        self,
        trace: Trace,
        capacity_blocks: int,
        policy: Policy,
        *,
        instances: int = INSTANCES,
        is_loaded: bool = True,
    ) -> None:
        self.trace = trace
        self.policy = policy
        self.kvbm = KVBM()
        self.loads = LoadBook()
        self.predictions = Predictions()
        self.instances: dict[str, Instance] = {}
        for number in range(instances):
            name = f"instance-{number}"
            self.instances[name] = Instance(name, capacity_blocks, self.kvbm)
            self.kvbm.join(
                InstanceDescription(
                    instance_id=name, incarnation=1, model="m", block_tokens=trace.block_tokens
                )
            )
        duration = trace.requests[-1].arrival_seconds - trace.requests[0].arrival_seconds
        self.rate = trace.input_tokens / max(duration, 1.0) / instances / BUSY
        self._is_loaded = is_loaded
        self.hit_tokens = 0
        self.waits: list[float] = []
        # Until when which prompt is computed, of how many new tokens, and where.
        self._done: list[tuple[float, int, int, str]] = []

    def run(self) -> None:
        for number, request in enumerate(self.trace.requests):
            self._advance(request.arrival_seconds)
            self._route(number, request)
        self._advance(float("inf"))

    def _route(self, number: int, request: TraceRequest) -> None:
        now = request.arrival_seconds
        tokens = self.trace.block_tokens
        places = self.kvbm.models()[0]
        depths = self.kvbm.matched_blocks(places, request.hashes)
        self.predictions.expire(now)
        for name, depth in self.predictions.depths(request.hashes, -1, places.names).items():
            depths[name] = max(depth, depths.get(name, 0))
        matches = {
            name: WorkerMatch(depth * tokens, depth * tokens) for name, depth in depths.items()
        }
        candidates = [
            Candidate(name, matches.get(name, WorkerMatch(0, 0)), self.loads.load(name), self.rate)
            for name in self.instances
        ]
        chosen = self.policy.choose(request.input_tokens, candidates).worker_id
        self.loads.begin(
            str(number),
            chosen,
            new_tokens=request.input_tokens - depths.get(chosen, 0) * tokens,
            total_tokens=request.input_tokens,
        )
        self.predictions.expect(str(number), places.names.bits[chosen], request.hashes)
        instance = self.instances[chosen]
        instance.queue.append(number)
        if len(instance.queue) == 1:
            self._compute(instance, now)

    def _compute(self, instance: Instance, now: float) -> None:
        """Begin the first prompt in an instance's queue."""
        number = instance.queue[0]
        request = self.trace.requests[number]
        usable = request.hashes[: self.trace.usable_blocks(request)]
        hit_tokens = instance.match(usable) * self.trace.block_tokens
        new_tokens = request.input_tokens - hit_tokens
        self.hit_tokens += hit_tokens
        instance.computed_tokens += new_tokens
        seconds = new_tokens / self.rate if self._is_loaded else 0.0
        heapq.heappush(self._done, (now + seconds, number, new_tokens, instance.name))

    def _advance(self, until: float) -> None:
        """End the prompts that are computed by then, and begin those behind them."""
        while self._done and self._done[0][0] <= until:
            now, number, new_tokens, name = heapq.heappop(self._done)
            request, instance = self.trace.requests[number], self.instances[name]
            self.waits.append(now - request.arrival_seconds)
            self.loads.computed(str(number), new_tokens)
            self.loads.end(str(number))
            self.predictions.end(str(number), now, is_computed=True)
            instance.keep(request.hashes)
            instance.queue.popleft()
            if instance.queue:
                self._compute(instance, now)

    def figures(self) -> Figures:
        computed = [instance.computed_tokens for instance in self.instances.values()]
        return {
            "hit_rate": self.hit_tokens / self.trace.input_tokens,
            "computed_tokens": sum(computed),
            "imbalance": max(computed) / (sum(computed) / len(computed)),
            "prefill_p50_seconds": percentile(self.waits, 50),
            "prefill_p99_seconds": percentile(self.waits, 99),
        }


def trace_of(path: Path, limit: int | None) -> Trace:
    """The trace, without the requests that have no prompt."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as kept, gzip.open(path, "rt") as lines:
        kept.writelines(line for line in lines if json.loads(line)["input_length"])
        kept.flush()
        return read_trace(Path(kept.name), limit=limit)


def replay(trace: Trace, capacity_blocks: int, **options: Any) -> Figures:
    """A trace with every policy."""
    figures: Figures = {}
    for name in POLICY_NAMES:
        cluster = Cluster(trace, capacity_blocks, make_policy(name, seed=1), **options)
        cluster.run()
        figures[name] = cluster.figures()
    return figures


def replay_traces(limit: int | None, figures: Figures, bars: dict[str, Any]) -> None:
    """All columns, one by one and under load."""
    for column, (file, capacity_blocks, hit_bar, imbalance_bar) in COLUMNS.items():
        path = TRACES / f"{file}.jsonl.gz"
        if not path.exists():
            note(f"{column}: {path.name} is not here")
            continue
        trace = trace_of(path, limit)
        for way, is_loaded in (("one by one", False), ("under load", True)):
            title = f"{column}, {way}"
            note(title)
            figures[title] = replay(trace, capacity_blocks, is_loaded=is_loaded)
            balanced = figures[title]["Balanced"]
            bars[f"{title}: hits"] = at_least(round(balanced["hit_rate"], 3), hit_bar)
            bars[f"{title}: imbalance"] = at_most(round(balanced["imbalance"], 2), imbalance_bar)


def replay_made(figures: Figures, bars: dict[str, Any]) -> None:
    """Conversations at two instances, and one prefix that everybody has."""
    title = "conversations, two instances"
    note(title)
    found = figures[title] = replay(*conversations(seed=1), instances=2)
    ratio = found["Balanced"]["computed_tokens"] / found["RoundRobin"]["computed_tokens"]
    bars[f"{title}: computed, of RoundRobin's"] = at_most(ratio, 0.5)
    bars[f"{title}: imbalance"] = at_most(found["Balanced"]["imbalance"], SHARE_BAR)
    title = "one hot prefix"
    note(title)
    found = figures[title] = replay(*one_hot_prefix(seed=1))
    hits, best = (found[name]["hit_rate"] for name in ("Balanced", "MaxPrefix"))
    bars[f"{title}: hits, of MaxPrefix's"] = at_least(hits / best, 0.95)
    bars[f"{title}: imbalance"] = at_most(found["Balanced"]["imbalance"], SHARE_BAR)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    figures: Figures = {}
    bars: dict[str, Any] = {}
    replay_traces(1_500 if arguments.quick else None, figures, bars)
    replay_made(figures, bars)
    figures["other_load_cores"] = load.cores()
    emit(arguments, facts=facts, statistic="one run in virtual time", figures=figures, bars=bars)
    sys.exit(0 if all(bar["met"] for bar in bars.values()) else 1)


if __name__ == "__main__":
    main()
