"""A real trace, replayed: what hits is what a cache without limits would have hit, to the token."""

import pytest
from checks import assert_at_rest, assert_same
from engine_process import opal, running_engine
from prompts import greedy, request
from reference import Reference
from traces import conversation_trace, infinite_cache_hit_tokens, whole_block_paths

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ONE_TOKEN = greedy(1)  # its KV is never computed, so an answer adds nothing to the caches


@pytest.mark.parametrize("chunk_tokens", [32, 256])
def test_replay_hits_everything_there_is(reference: Reference, chunk_tokens: int) -> None:
    """The tier holds everything, the device almost nothing; one request at a time.

    Chunks of one block, and chunks of eight, of which parts hit as well.
    """
    trace = conversation_trace()
    prompts = [one.tokens() for one in trace]
    with running_engine(
        kv_transfer_config=opal(
            {"chunk_size": chunk_tokens, "CPUMemory": {"capacity_GB": "768MiB"}}
        ),
        max_model_len=7_680,
        num_gpu_blocks_override=512,
        max_num_seqs=1,
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
    # Long hits answer as a prefill would.
    checked = [
        place
        for place, answer in enumerate(answers)
        if answer["opal"]["hit_tokens"] and len(prompts[place]) < 4_000
    ][::8]
    assert_same(
        [answers[place] for place in checked],
        reference.answers([request(prompts[place], sampling=ONE_TOKEN) for place in checked]),
    )
