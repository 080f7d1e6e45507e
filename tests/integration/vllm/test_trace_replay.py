"""A real trace, replayed: what hits is what a cache without limits would have hit, to the token."""

from typing import Any

import pytest
from checks import assert_at_rest, assert_same
from engine_process import opal, running_engine
from prompts import greedy, request
from reference import Reference
from traces import conversation_trace, infinite_cache_hit_tokens, whole_block_paths

from opal_connector.cli.models import ensure_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ONE_TOKEN = greedy(1)  # its KV is never computed, so an answer adds nothing to the caches


def replay(prompts: list[list[int]], chunk_tokens: int, **settings: Any) -> list[dict[str, Any]]:
    """Serve the trace's prompts, one at a time, and hold the sum against the trace itself.

    The tier has room for everything, the device for no more than two of the longest prompts.

    Returns:
        The answers.
    """
    trace = conversation_trace()
    extra = {"chunk_size": chunk_tokens, "CPUMemory": {"capacity_GB": "768MiB"}}
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
        stored = engine.call("tier_blocks")

    hit_tokens = sum(answer["cached_tokens"] for answer in answers)
    tier_tokens = sum(answer["opal"]["hit_tokens"].get("CPUMemory", 0) for answer in answers)
    assert hit_tokens == infinite_cache_hit_tokens(trace)
    assert len(stored) == len(whole_block_paths(trace))
    assert metrics.total("vllm:opal_evictions_total") == 0
    assert books["used_bytes"] < books["capacity_bytes"]
    # Both parts did something, and everybody counts them alike.
    source = "vllm:prompt_tokens_cached_by_source_total"
    assert 0 < tier_tokens < hit_tokens
    assert metrics.total(source, source="host") == tier_tokens
    assert metrics.total(source, source="device") == hit_tokens - tier_tokens
    assert metrics.total("vllm:opal_hit_tokens_total", tier="CPUMemory") == tier_tokens
    return answers


def test_chunks_of_one_block(reference: Reference) -> None:
    """The model with four layers; long hits answer as a prefill would."""
    prompts = [one.tokens() for one in conversation_trace()]

    answers = replay(prompts, chunk_tokens=32)

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

    replay(prompts, chunk_tokens=256, model=ensure_tiny_llama())
