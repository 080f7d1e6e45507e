"""What `opal router` and vllm-router 0.1.17 add to a request, side by side in one run.

Both stand before the same two fast engines (`fast_engine.py`) and are asked by `wrk`, in turns:
an engine directly, our router with two policies and with two processes, and vllm-router with three
of its policies. All know from events where every prompt's blocks are, if their policy asks for it.
`whole` answers come at once: requests a second. `paced` ones take 50 ms, as if they computed: the
added latency there is what a user would see. Needs wrk (a Debian package) and, once, a network to
make vllm-router's virtual environment.
"""

import contextlib
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    OtherLoad,
    at_least,
    at_most,
    emit,
    machine_facts,
    median_ratio,
    note,
    parser,
    session_seconds,
)
from fast_engine import BLOCK_TOKENS, MODEL, Engines, requests_for, running_engines
from interop import venvs, vllm_router_process
from rich.table import Table
from router_processes import opal_router_has, running_opal_router
from wrk import Load, Wrk

from opal_connector.cli.model_store import cache_directory
from opal_connector.cli.server_process import free_port

CONCURRENCIES = (1, 16, 64)
KINDS = ("whole", "paced")
DIRECT = "direct"
WORKERS = "opal Balanced, 2 workers"
BALANCED = "opal Balanced"
ROUND_ROBIN = "opal RoundRobin"
PEER_POLICIES = ("round_robin", "cache_aware", "kv_aware")
PEERS = tuple(f"vllm-router {policy}" for policy in PEER_POLICIES)
COMPARABLE = {BALANCED: PEERS[2], ROUND_ROBIN: PEERS[0], WORKERS: PEERS[2]}
_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class Arm:
    """What is asked: where, and the session whose processor time is its own."""

    name: str
    url: str
    session: int


@dataclass(frozen=True)
class Run:
    """One load on one arm, and the processor seconds that the arm's processes took."""

    load: Load
    cpu_seconds: float
    cores_of_others: float

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_seconds / max(1, self.load.requests)


# ---- what is asked ----


@contextlib.contextmanager
def opal_arms(engines: Engines, directory: Path) -> Iterator[list[Arm]]:
    """Our router: two policies, and two processes where this version has them."""
    places = [{key: place[key] for key in ("url", "events")} for place in engines.places]
    plans: dict[str, tuple[str, tuple[str, ...]]] = {
        BALANCED: ("Balanced", ()),
        ROUND_ROBIN: ("RoundRobin", ()),
    }
    if opal_router_has("--workers"):
        plans[WORKERS] = ("Balanced", ("--workers", "2"))
    with contextlib.ExitStack() as stack:
        arms = []
        for number, (name, (policy, options)) in enumerate(plans.items()):
            config = {"port": free_port(), "policy": policy, "instances": places}
            log_path = directory / f"opal-{number}.log"
            router = stack.enter_context(running_opal_router(config, log_path, *options))
            arms.append(Arm(name, router.url, router.pid))
        yield arms


@contextlib.contextmanager
def peer_arms(engines: Engines, directory: Path, binaries: Path) -> Iterator[list[Arm]]:
    """vllm-router with each policy, which has heard what the engines hold."""
    with contextlib.ExitStack() as stack:
        arms = []
        for name, policy in zip(PEERS, PEER_POLICIES, strict=True):
            options = ["--worker-urls", *(place["url"] for place in engines.places)]
            options += ["--policy", policy, "--log-level", "warning"]
            if policy == "kv_aware":
                for place in engines.places:
                    options += ["--kv-event-source", f"{place['url']}={place['vllm_events']}"]
                options += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", MODEL]
            log_path = directory / f"vllm-router-{policy}.log"
            router = stack.enter_context(vllm_router_process.running(binaries, options, log_path))
            arms.append(Arm(name, router.url, router.pid))
        time.sleep(_JOIN_SECONDS)  # it does not say when it listens to events
        engines.announce()
        yield arms


# ---- measuring ----


def ask(arm: Arm, wrk: Wrk, connections: int, seconds: float, engines: Engines) -> Run:
    """One run; a failed request is an error, for it may have been a fast one."""
    others = OtherLoad((arm.session, engines.pid))
    used = session_seconds(frozenset((arm.session,)))
    load = wrk.run(arm.url, connections, seconds)
    used = session_seconds(frozenset((arm.session,))) - used
    if load.failures:
        raise RuntimeError(f"{arm.name}: {load.failures} of {load.requests} requests failed")
    return Run(load, used, max(0.0, others.cores() - load.client_cores))


def measure(arms: list[Arm], wrk: Wrk, engines: Engines, arguments: Any) -> dict[str, Any]:
    """Rounds at every concurrency. Each begins with another arm."""
    found: dict[str, Any] = {}
    for arm in arms:
        ask(arm, wrk, 8, 1.0, engines)  # warm
    for concurrency in CONCURRENCIES:
        runs: dict[str, list[Run]] = {arm.name: [] for arm in arms}
        for turn in range(arguments.rounds):
            start = turn % len(arms)
            for arm in arms[start:] + arms[:start]:
                runs[arm.name].append(ask(arm, wrk, concurrency, arguments.seconds, engines))
        found[str(concurrency)] = {name: _row(runs[name], runs[DIRECT]) for name in runs}
        found[str(concurrency)]["ratios"] = _ratios(runs)
        note(f"{concurrency} connections: {_brief(found[str(concurrency)])}")
    return found


def _row(runs: list[Run], direct: list[Run]) -> dict[str, float]:
    """Medians over rounds; what is added is taken within a round."""
    rates = [run.load.requests_per_second for run in runs]
    pairs = [(run.load, plain.load) for run, plain in zip(runs, direct, strict=True)]
    figures = {
        "requests_per_second": statistics.median(rates),
        "requests_per_second_least": min(rates),
        "requests_per_second_most": max(rates),
        "p50_ms": statistics.median(run.load.p50_us for run in runs) / 1e3,
        "p99_ms": statistics.median(run.load.p99_us for run in runs) / 1e3,
        "added_p50_ms": statistics.median(one.p50_us - other.p50_us for one, other in pairs) / 1e3,
        "added_p99_ms": statistics.median(one.p99_us - other.p99_us for one, other in pairs) / 1e3,
        "cpu_us_per_request": statistics.median(run.cpu_us for run in runs),
        "cores": statistics.median(run.cpu_seconds / run.load.seconds for run in runs),
        "client_cores": statistics.median(run.load.client_cores for run in runs),
        "cores_used_by_others": statistics.median(run.cores_of_others for run in runs),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def _ratios(runs: Mapping[str, list[Run]]) -> dict[str, float]:
    """Requests a second of ours over those of each peer: the median of the rounds' ratios."""
    rates = {name: [run.load.requests_per_second for run in mine] for name, mine in runs.items()}
    return {
        f"{name} / {peer}": round(median_ratio(rates[name], rates[peer]), 3)
        for name in COMPARABLE
        if name in rates
        for peer in PEERS
    }


def _brief(rows: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {row['requests_per_second']:.0f}/s +{row['added_p50_ms']:.2f} ms"
        for name, row in rows.items()
        if name != "ratios"
    )


# ---- showing ----


def bars(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Added latency where requests take time, requests a second where they take none."""
    met: dict[str, Any] = {}
    for concurrency, rows in figures.get("paced", {}).items():
        for name in COMPARABLE:
            if name in rows:
                value = rows[name]["added_p50_ms"]
                met[f"{name}: added p50, ms, at {concurrency}"] = at_most(value, 2.0)
    for concurrency, rows in figures.get("whole", {}).items():
        for name, peer in COMPARABLE.items():
            if (ratio := rows["ratios"].get(f"{name} / {peer}")) is not None:
                least = 1.0 if name == WORKERS else 0.5
                met[f"{name} / {peer}: requests/s at {concurrency}"] = at_least(ratio, least)
    return met


def table(figures: Mapping[str, Any]) -> Table:
    """A row for every arm and concurrency."""
    heads = ("requests/s", "+-%", "p50 ms", "added p50", "added p99", "CPU us")
    shown = Table("", *heads, box=None, pad_edge=False)
    for column in shown.columns:
        column.no_wrap = True
    for kind in KINDS:
        for concurrency, rows in figures.get(kind, {}).items():
            shown.add_row(f"[bold]{kind}, {concurrency} at once")
            for name, row in rows.items():
                if name != "ratios":
                    shown.add_row(f"  {name}", *_cells(row))
    return shown


def _cells(row: Mapping[str, float]) -> Iterator[str]:
    rate = row["requests_per_second"]
    yield f"{rate:.0f}"
    spread = row["requests_per_second_most"] - row["requests_per_second_least"]
    yield f"{50 * spread / rate:.0f}"
    for key in ("p50_ms", "added_p50_ms", "added_p99_ms"):
        yield f"{row[key]:.2f}"
    yield f"{row['cpu_us_per_request']:.0f}"


def threads_of(session: int) -> int:
    """Threads of the process that leads a session."""
    return len(list(Path(f"/proc/{session}/task").iterdir()))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompt-tokens", type=int, default=512)
    options.add_argument("--kinds", default=",".join(KINDS), help="whole, paced or both")
    options.add_argument("--rounds", type=int, default=0, help="of every arm  [5, 1 with --quick]")
    options.add_argument("--seconds", type=float, default=0, help="of a run  [2, 1 with --quick]")
    options.add_argument("--venvs", type=Path, default=cache_directory() / "interop")
    arguments = options.parse_args()
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 5)
    arguments.seconds = arguments.seconds or (1.0 if arguments.quick else 2.0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # routers end with this process
    binaries = venvs.ensure(venvs.VLLM_ROUTER, arguments.venvs)
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="opal-benchmark-")))
        engines = stack.enter_context(running_engines(arguments.prompt_tokens))
        arms = [Arm(DIRECT, engines.places[0]["url"], engines.pid)]
        arms += stack.enter_context(opal_arms(engines, directory))
        arms += stack.enter_context(peer_arms(engines, directory, binaries))
        for kind in arguments.kinds.split(","):
            wrk = Wrk(requests_for(arguments.prompt_tokens, kind), directory / f"{kind}.requests")
            figures[kind] = measure(arms, wrk, engines, arguments)
        figures["threads"] = {arm.name: threads_of(arm.session) for arm in arms}
        figures["not_run"] = [name for name in COMPARABLE if name not in figures["threads"]]
    emit(
        arguments,
        facts=machine_facts(),
        statistic=f"medians of {arguments.rounds} rounds, every arm in each",
        figures=figures,
        bars=bars(figures),
        table=table(figures),
    )


if __name__ == "__main__":
    main()
