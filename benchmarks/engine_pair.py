"""Two real servers with Opal for the benchmarks of routers, announced in both streams of events."""

import concurrent.futures
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from opal_connector.cli.progress import Reporter
from opal_connector.cli.prometheus import parse_prometheus
from opal_connector.cli.server_process import ServerPlan, free_port, opal_transfer_config, serve

NAMES: Final = ("one", "two")
MODEL_NAME: Final = "model"
BLOCK_TOKENS: Final = 32
_PROMPT_TOKENS: Final = "vllm:prompt_tokens_total"
_CACHED_TOKENS: Final = "vllm:prompt_tokens_cached_by_source_total"
_METRICS_SECONDS_MAX: Final = 30.0


@dataclass(frozen=True)
class PairPlan:
    """What both serve, and how much their caches hold. `shared` adds a directory for both."""

    model: Path
    device_blocks: int
    memory: str
    shared: Path | None = None

    def tiers(self) -> dict[str, Any]:
        """Opal's own settings."""
        tiers: dict[str, Any] = {"kvc_tiers": ["CPUMemory"], "chunk_size": 2 * BLOCK_TOKENS}
        tiers["CPUMemory"] = {"capacity_GB": self.memory}
        if self.shared is not None:
            tiers["kvc_tiers"].append("DistributedFS")
            tiers["DistributedFS"] = {
                "path": str(self.shared),
                "capacity_GB": "4GiB",
                "refresh_seconds": 0.5,
            }
        return tiers


@dataclass(frozen=True)
class PairedEngine:
    """One of the two, and where it tells what it holds."""

    name: str
    url: str
    events: str
    vllm_events: str
    vllm_replay: str

    def tokens(self) -> tuple[int, int]:
        """Prompt tokens of all requests that it has had, and those of them that it computed."""
        url = f"{self.url}/metrics"
        samples = parse_prometheus(
            httpx.get(url, timeout=_METRICS_SECONDS_MAX, trust_env=False).text
        )
        totals = dict.fromkeys((_PROMPT_TOKENS, _CACHED_TOKENS), 0.0)
        for sample in samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
        return round(totals[_PROMPT_TOKENS]), round(totals[_PROMPT_TOKENS] - totals[_CACHED_TOKENS])


@contextlib.contextmanager
def running_pair(plan: PairPlan, logs: Path) -> Iterator[list[PairedEngine]]:
    """Both, healthy, for the length of a `with` block."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(len(NAMES)))
        # Contexts are entered by threads, for a start takes half a minute, and left by this one.
        contexts = [_engine(plan, name, logs) for name in NAMES]
        waits = [pool.submit(context.__enter__) for context in contexts]
        concurrent.futures.wait(waits)
        for context, wait in zip(contexts, waits, strict=True):
            if wait.exception() is None:
                stack.push(context)
        yield [wait.result() for wait in waits]


@contextlib.contextmanager
def _engine(plan: PairPlan, name: str, logs: Path) -> Iterator[PairedEngine]:
    channel, stream = free_port(2), free_port(2)
    events = f"tcp://127.0.0.1:{channel}"
    own = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{stream}",
        "replay_endpoint": f"tcp://*:{stream + 1}",
    }
    server_plan = ServerPlan(
        plan.model,
        logs / f"{name}.log",
        opal_transfer_config(
            {**plan.tiers(), "instance_id": name, "events": {"endpoint": events}},
        ),
        (
            *("--served-model-name", MODEL_NAME, "--block-size", str(BLOCK_TOKENS)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
            *("--num-gpu-blocks-override", str(plan.device_blocks), "--max-num-seqs", "16"),
            *("--kv-events-config", json.dumps(own)),
            "--enable-prompt-tokens-details",
        ),
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with serve(server_plan, Reporter()) as server:
        yield PairedEngine(
            name,
            server.url,
            events,
            f"tcp://127.0.0.1:{stream}",
            f"tcp://127.0.0.1:{stream + 1}",
        )
