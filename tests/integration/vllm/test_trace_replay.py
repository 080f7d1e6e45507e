"""A real trace, replayed: what hits is what a cache without limits would have hit, to the token."""

from pathlib import Path
from typing import Any

import pytest
from checks import assert_at_rest, assert_same
from engine_process import Metrics, opal, running_engine
from prompts import greedy, request
from reference import Reference
from traces import conversation_trace, infinite_cache_hit_tokens, whole_block_paths

from opal_connector.cli.models import ensure_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ONE_TOKEN = greedy(1)  # its KV is never computed, so an answer adds nothing to the caches


def replay(
    prompts: list[list[int]], extra: dict[str, Any], **settings: Any
) -> tuple[list[dict[str, Any]], dict[str, int], Metrics]:
    """Serve the trace's prompts, one at a time, and hold the sum against the trace itself.

    The last tier has room for everything, the device for no more than two of the longest prompts.

    Returns:
        The answers, the tokens that came from every tier, and the metrics at the end.
    """
    trace = conversation_trace()
    with running_engine(
        kv_transfer_config=opal(extra),
        max_model_len=7_680,
        num_gpu_blocks_override=512,
        max_num_seqs=1,
        **settings,
    ) as engine:
        answers = [engine.ask(tokens, sampling=ONE_TOKEN) for tokens in prompts]
        metrics = engine.metrics()
        books = assert_at_rest(engine)
        stored = engine.call("tier_blocks", place=-1)

    hit_tokens = sum(answer["cached_tokens"] for answer in answers)
    tier_tokens: dict[str, int] = {}
    for answer in answers:
        for tier, tokens in answer["opal"]["hit_tokens"].items():
            tier_tokens[tier] = tier_tokens.get(tier, 0) + tokens
    assert hit_tokens == infinite_cache_hit_tokens(trace)
    assert len(stored) == len(whole_block_paths(trace))
    assert books["used_bytes"] <= books["capacity_bytes"]
    # All parts did something, and everybody counts them alike.
    source = "vllm:prompt_tokens_cached_by_source_total"
    assert 0 < sum(tier_tokens.values()) < hit_tokens
    assert metrics.total(source, source="host") == tier_tokens.get("CPUMemory", 0)
    assert metrics.total(source, source="disk") == tier_tokens.get("LocalNVMe", 0)
    assert metrics.total(source, source="device") == hit_tokens - sum(tier_tokens.values())
    for tier, tokens in tier_tokens.items():
        assert metrics.total("vllm:opal_hit_tokens_total", tier=tier) == tokens
    return answers, tier_tokens, metrics


def memory_only(chunk_tokens: int) -> dict[str, Any]:
    return {"chunk_size": chunk_tokens, "CPUMemory": {"capacity_GB": "768MiB"}}


def test_chunks_of_one_block(reference: Reference) -> None:
    """The model with four layers; long hits answer as a prefill would."""
    prompts = [one.tokens() for one in conversation_trace()]

    answers, _, metrics = replay(prompts, memory_only(32))
    assert metrics.total("vllm:opal_evictions_total") == 0

    checked = [
        place
        for place, answer in enumerate(answers)
        if answer["opal"]["hit_tokens"] and len(prompts[place]) < 4_000
    ][::8]
    assert_same(
        [answers[place] for place in checked],
        reference.answers([request(prompts[place], sampling=ONE_TOKEN) for place in checked]),
    )


def test_chunks_of_eight_blocks() -> None:
    """Coarse chunks lose nothing: a chunk that differs near its end still brings its start."""
    prompts = [one.tokens(0, 255) for one in conversation_trace()]

    replay(prompts, memory_only(256), model=ensure_tiny_llama())


def test_memory_that_is_too_small_over_a_disk_that_is_not(tmp_path: Path) -> None:
    """What memory forgets comes from disk: no token is computed twice, no chunk written twice."""
    prompts = [one.tokens(0, 255) for one in conversation_trace()]
    extra = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe"],
        "chunk_size": 64,
        "CPUMemory": {"capacity_GB": "24MiB"},
        "LocalNVMe": {"path": str(tmp_path), "capacity_GB": "1GiB"},
    }

    _, tier_tokens, metrics = replay(prompts, extra, model=ensure_tiny_llama())

    assert tier_tokens["CPUMemory"] > 0
    assert tier_tokens["LocalNVMe"] > 0
    assert metrics.total("vllm:opal_evictions_total", tier="CPUMemory") > 0
    assert metrics.total("vllm:opal_evictions_total", tier="LocalNVMe") == 0
    assert metrics.total("vllm:opal_failures_total") == 0
