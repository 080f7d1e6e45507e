"""Eviction policies on request traces: hit rates under leaf-only eviction, AUTO, cost per touch.

A request's blocks are looked up until the first one that is missing; the found ones are touched
from the tail, the missing ones stored from the head. As in the books of a tier, a block whose next
block is stored is pinned, so only leaves can be evicted, and a new block is pinned until it is
written. The hit of a column is weighted by tokens, over the whole trace, the cold start included.

AUTO misses two kinds of bars. In conversation 1000 and synthetic 500 one token in twenty hits, in
lumps of a few requests: the candidate that leads early is not the one that is best over the whole
trace, and the time until that shows is lost. And it works for three candidates besides the one in
force: with a sample of 1,024 to 2,048 keys, at 10,000 blocks every eighth access goes to three
small tiers, which together with learning the sample's chains costs as much as the policy itself.
"""

import gzip
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import Figures, OtherLoad, at_least, at_most, emit, machine_facts, note, parser

from opal_connector.eviction import POLICIES, EvictionPolicy, make_policy
from opal_connector.eviction.auto import CANDIDATES
from opal_connector.simulation import Belady

BLOCK_TOKENS = 512
TRACES = Path(__file__).parents[2] / "shared/traces"
COLUMNS = {
    "conversation": ("mooncake_conversation_trace", (1000, 3000, 10_000, 30_000, 60_000)),
    "synthetic": ("mooncake_synthetic_trace", (500, 1000, 3000, 10_000, 20_000)),
    "agent": ("claude_code_512", (500, 1000, 2000, 4000, 8000)),
}
COST_REPETITIONS = 3
Request = tuple[int, list[bytes]]  # tokens, and the keys of its whole blocks
Trace = list[Request]
Call = tuple[str, Any]


def block_key(identity: int) -> bytes:
    """A key as a tier has it: a digest and the kv group."""
    return hashlib.sha256(identity.to_bytes(8, "little")).digest() + b"\0\0"


def read_trace(path: Path) -> Trace:
    """A file in Mooncake's format."""
    trace: Trace = []
    with gzip.open(path, "rt") as lines:
        for record in map(json.loads, lines):
            whole_blocks = record["input_length"] // BLOCK_TOKENS
            keys = [block_key(identity) for identity in record["hash_ids"][:whole_blocks]]
            trace.append((record["input_length"], keys))
    return trace


def generated_trace(seed: int, request_count: int, turn_chance: float, chats_kept: int) -> Trace:
    """Chats in turns behind one common block: most have one turn, a few have many.

    `turn_chance` is how likely a request continues one of the `chats_kept` latest chats.
    """
    rng = random.Random(seed)
    next_key = (block_key(identity) for identity in range(1, 1 << 30)).__next__
    chats: list[list[bytes]] = []
    trace: Trace = []
    for _ in range(request_count):
        if chats and rng.random() < turn_chance:
            past = chats.pop(rng.randrange(max(0, len(chats) - chats_kept), len(chats)))
        else:
            past = [block_key(0)]
        keys = past + [next_key() for _ in range(1 + int(rng.lognormvariate(1.5, 1.0)))]
        if len(keys) < 200:
            chats.append(keys)
        trace.append((len(keys) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS), keys))
    return trace


def load_traces(is_quick: bool) -> tuple[dict[str, tuple[Trace, tuple[int, ...]]], bool]:
    """Per trace its requests and the capacities in blocks; and whether they are the real ones."""
    is_real = all((TRACES / f"{name}.jsonl.gz").exists() for name, _ in COLUMNS.values())
    if is_real:
        loaded = {
            trace: (read_trace(TRACES / f"{name}.jsonl.gz"), capacities)
            for trace, (name, capacities) in COLUMNS.items()
        }
    else:
        loaded = {
            "conversation": (generated_trace(1, 12_000, 0.4, 400), COLUMNS["conversation"][1]),
            "synthetic": (generated_trace(2, 4000, 0.7, 200), COLUMNS["synthetic"][1]),
            "agent": (generated_trace(3, 2000, 0.96, 30), COLUMNS["agent"][1]),
        }
    if is_quick:
        loaded = {
            name: (trace[: len(trace) // 4], capacities[:3])
            for name, (trace, capacities) in loaded.items()
        }
    return loaded, is_real


class Tier:
    """The books of one tier, blocks only: chains, pins of what has children, and a policy.

    Mutable state: `_parents` (stored block -> the one before it), `_children` (count per block),
    the policy, and with `calls` a list of everything that the policy was asked.
    """

    def __init__(self, policy: EvictionPolicy, capacity: int, calls: list[Call] | None = None):
        self._policy = policy
        self._capacity = capacity
        self._parents: dict[bytes, bytes | None] = {}
        self._children: dict[bytes, int] = {}
        self._calls = calls

    def request(self, keys: list[bytes]) -> int:
        """Serve a request, and return how many of its blocks were there."""
        found = 0
        while found < len(keys) and keys[found] in self._parents:
            found += 1
        for key in reversed(keys[:found]):
            self._ask("touch", key)
        parent = keys[found - 1] if found else None
        for key in keys[found:]:
            self._adopt(parent)
            if len(self._parents) >= self._capacity and not self._evict():
                self._abandon(parent)
                break
            self._ask("insert", key)
            self._ask("pin", key)  # until it is written
            self._parents[key] = parent
            parent = key
        if parent in self._parents and parent not in self._children:
            self._ask("unpin", parent)  # all are written; the others have children
        return found

    def _ask(self, call: str, argument: Any) -> Any:
        if self._calls is not None:
            self._calls.append((call, argument))
        return getattr(self._policy, call)(argument)

    def _evict(self) -> bool:
        victims = self._ask("evict", 1)
        if victims is None:
            return False
        self._abandon(self._parents.pop(victims[0]))
        return True

    def _adopt(self, parent: bytes | None) -> None:
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            self._ask("pin", parent)

    def _abandon(self, parent: bytes | None) -> None:
        if parent is None:
            return
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._ask("unpin", parent)


def hit_rate(trace: Trace, serve: Callable[[list[bytes]], int]) -> float:
    """Tokens served from the tier, of all tokens asked for."""
    hit_blocks = sum(serve(keys) for _, keys in trace)
    return hit_blocks * BLOCK_TOKENS / sum(tokens for tokens, _ in trace)


def seconds_per_touch(name: str, trace: Trace, capacity: int) -> float:
    """Process time of all calls of a replay, divided by its accesses (touches and insertions)."""
    calls: list[Call] = []
    tier = Tier(make_policy(name), capacity, calls)
    for _, keys in trace:
        tier.request(keys)
    accesses = sum(call in ("touch", "insert") for call, _ in calls)
    seconds = []
    for _ in range(COST_REPETITIONS):
        policy = make_policy(name)
        bound = [(getattr(policy, call), argument) for call, argument in calls]
        began = time.process_time()
        for call, argument in bound:
            call(argument)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds) / accesses


def deep_bytes(value: Any, seen: set[int]) -> int:
    """Memory of a policy's structures, keys not included: they are the caller's."""
    if isinstance(value, (bytes, type)) or id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    return size + sum(deep_bytes(part, seen) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from vars(value).values()


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    traces, is_real = load_traces(arguments.quick)
    candidates = [name for name, policy in POLICIES.items() if policy in CANDIDATES]
    hits: dict[str, dict[str, float]] = {}
    costs: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    beside = 0
    for trace_name, (trace, capacities) in traces.items():
        for capacity in capacities:
            column = f"{trace_name}_{capacity}"
            note(f"eviction: {column}")
            rates = {}
            for name in POLICIES:
                policy = make_policy(name)
                rates[name] = hit_rate(trace, Tier(policy, capacity).request)
                if name == "AUTO":
                    state = vars(policy)
                    parts = [state["_trial"], state["_kinship"]]
                    beside = max(beside, deep_bytes(parts, set()))
            belady = hit_rate(trace, Belady([keys for _, keys in trace], capacity).request)
            best = max(candidates, key=rates.__getitem__)
            hits[column] = {
                **{name: round(rate, 4) for name, rate in rates.items()},
                "belady": round(belady, 4),
                "best_candidate": best,
                "auto_of_belady": round(rates["AUTO"] / belady, 4),
                "best_candidate_of_belady": round(rates[best] / belady, 4),
            }
            bars[f"auto_of_best_{column}"] = at_least(rates["AUTO"] / rates[best], 0.98)
            bars[f"auto_of_lru_{column}"] = at_least(rates["AUTO"] / rates["LRU"], 0.99)
    trace, capacities = traces["conversation"]
    for name in POLICIES:
        note(f"eviction: cost of {name}")
        costs[name] = seconds_per_touch(name, trace, capacities[2]) * 1e6
        bars[f"us_per_touch_{name}"] = at_most(costs[name], 3.0)
    figures: Figures = {
        "traces": "real" if is_real else "generated",
        "auto_candidates": candidates,
        "hit": hits,
        "us_per_touch": {name: round(cost, 3) for name, cost in costs.items()},
        "auto_extra_mib_at_most": round(beside / (1 << 20), 2),
        "cores_used_by_others": round(load.cores(), 2),
    }
    statistic = (
        "hit: tokens of the whole trace; us_per_touch: process time of all calls of the "
        f"conversation_{capacities[2]} replay per touch and insertion, median of {COST_REPETITIONS}"
    )
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


if __name__ == "__main__":
    main()
