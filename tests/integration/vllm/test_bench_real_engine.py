"""`opal bench` against a real server with Opal: its tokens, its times, its tiers add up."""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from opal_connector.cli.bench import BenchResult, SC25Workload, Sessions, TraceWorkload, Workload
from opal_connector.cli.bench.client import COMPLETIONS, Target
from opal_connector.cli.bench.driver import run
from opal_connector.cli.bench.summary import summarize
from opal_connector.cli.main import opal
from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_client import ServerClient
from opal_connector.cli.server_process import ServerPlan, opal_transfer_config, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all tests here; every test has a seed of its own."""
    extra = {
        "kvc_tiers": ["CPUMemory"],
        "CPUMemory": {"capacity_GB": "256MiB"},
        "chunk_size": CHUNK_TOKENS,
    }
    plan = ServerPlan(
        model=ensure_tiny_llama(),
        log_path=tmp_path_factory.mktemp("bench") / "server.log",
        transfer_config=opal_transfer_config(extra),
        arguments=(
            *("--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--enforce-eager"),
            *("--max-model-len", "4096", "--max-num-seqs", "8", "--enable-prompt-tokens-details"),
        ),
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with serve(plan, Reporter()) as server:
        yield server.url


def bench(workload: Workload, url: str, **more: object) -> BenchResult:
    target = Target(url=url, ignore_eos=True, **more)  # type: ignore[arg-type]
    return asyncio.run(run(workload, target))


def check(result: BenchResult) -> None:
    """What holds for every run against a server that says everything."""
    assert [one.error for one in result.requests] == [""] * len(result.requests)
    assert result.notes == []
    assert result.tier_tokens is not None
    assert next(iter(result.tier_tokens)) == "apc"
    assert list(result.tier_tokens)[-1] == "Cache Miss"
    assert sum(result.tier_tokens.values()) == sum(
        one.prompt_tokens or 0 for one in result.requests
    )
    for one in result.requests:
        assert one.ttft_seconds is not None
        assert 0 < one.ttft_seconds <= one.latency_seconds
        assert one.token_seconds == sorted(one.token_seconds)


@pytest.mark.parametrize("endpoint", [None, COMPLETIONS])
def test_turns_find_what_their_conversation_computed(url: str, endpoint: str | None) -> None:
    """A turn's prompt begins with the one before and its answer: only what is new is computed."""
    workload = Sessions(
        seed=1 if endpoint else 2,
        num_users=3,
        turns_per_user=3,
        system_prompt_size=100,
        user_message_size=10,
        output_tokens=40,
    )

    result = bench(workload, url, endpoint=endpoint)

    check(result)
    for user in range(3):
        own = [one for one in result.requests if one.conversation_id == f"user-{user}"]
        assert [one.turn for one in own] == [0, 1, 2]
        for sooner, later in itertools.pairwise(own):
            assert sooner.prompt_tokens is not None
            assert later.prompt_tokens is not None
            assert later.cached_tokens is not None
            assert later.prompt_tokens > sooner.prompt_tokens + 40
            # But for the last, unfull block, and the tokens that a template puts behind an answer.
            assert later.cached_tokens >= sooner.prompt_tokens + 40 - 2 * BLOCK_TOKENS
    assert all(one.output_tokens == 40 for one in result.requests)
    summary = summarize(result)
    assert summary.tpot is not None
    assert summary.output_tokens == 9 * 40


def test_warm_pass_comes_from_opals_tier_after_the_device_lost_it(url: str) -> None:
    """Cold, then from the device; once that is emptied, the same workload comes from CPUMemory."""
    workload = SC25Workload(
        seed=3, num_prompts=3, prompt_size_min=321, prompt_size_max=961, output_tokens=2
    )
    whole_blocks = sum((size - 1) // BLOCK_TOKENS * BLOCK_TOKENS for size in workload.sizes)
    chunks = sum((size - 1) // CHUNK_TOKENS * CHUNK_TOKENS for size in workload.sizes)

    first = bench(workload, url)
    with ServerClient(url) as client:
        client.reset_prefix_cache()
    second = bench(workload, url)

    check(first)
    check(second)
    assert first.tier_tokens is not None
    assert second.tier_tokens is not None
    assert first.tier_tokens["apc"] == whole_blocks
    assert first.tier_tokens["CPUMemory"] == 0
    assert second.tier_tokens["CPUMemory"] >= chunks - 3 * CHUNK_TOKENS
    assert second.tier_tokens["apc"] >= whole_blocks
    assert set(summarize(second).phases) == {"cold", "warm"}


def test_trace_hits_exactly_what_its_ids_say(url: str, tmp_path: Path) -> None:
    """A real engine finds the blocks that the trace names as common, to the token."""
    chains = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6], [7], [1, 2, 3, 4]]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": 0,
                    "input_length": BLOCK_TOKENS * len(ids),
                    "output_length": 1,
                    "hash_ids": ids,
                }
            )
            + "\n"
            for ids in chains
        )
    )
    workload = TraceWorkload(
        seed=4, trace_file=path, chunk_size=BLOCK_TOKENS, max_outstanding_requests=1
    )

    result = bench(workload, url)

    check(result)
    # Of the last prompt one block is computed: some token has to be.
    assert [one.cached_tokens for one in result.requests] == [
        blocks * BLOCK_TOKENS for blocks in (0, 2, 3, 0, 3)
    ]


def test_command_prints_the_table(url: str) -> None:
    """The rows that cannot be made up: device, tier and misses of a real server."""
    result = CliRunner().invoke(
        opal,
        [
            *("bench", "poisson", "--url", url, "--seed", "5", "--request-rate", "20"),
            *("--total-requests", "10", "--output-tokens-min", "4", "--output-tokens-max", "8"),
            *("--prompt-size-min", "300", "--prompt-size-max", "400"),
            *("--default-prefix-length", "256", "--prefixes", "2", "--ignore-eos"),
        ],
    )

    assert result.exit_code == 0, result.output
    for row in (
        "[apc] hit rate (%)",
        "[CPUMemory] total tokens fetched",
        "Cache Miss (",
        "P99 ITL",
    ):
        assert row in result.stdout
    assert "Note:" not in result.stdout
