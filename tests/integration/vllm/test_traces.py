"""The oracle of the trace replay, checked by hand and against a published figure."""

import pytest
from traces import (
    REAL_TRACE,
    TraceRequest,
    generated_trace,
    infinite_cache_hit_tokens,
    read_trace,
)


def test_hits_are_whole_blocks_without_a_hole() -> None:
    """Worked out by hand."""
    trace = [
        TraceRequest(96, (1, 2, 3)),  # cold
        TraceRequest(96, (1, 2, 3)),  # all but the block of its last token: 64
        TraceRequest(97, (1, 2, 3, 4)),  # 96
        TraceRequest(128, (1, 9, 3, 4)),  # 32, the hole ends it
        TraceRequest(128, (1, 2, 3, 4)),  # 96: block 4 was cut short when it was seen
    ]
    assert infinite_cache_hit_tokens(trace) == 64 + 96 + 32 + 96


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the real trace is not here")
def test_real_trace_has_its_known_figure() -> None:
    """Without any connector vLLM hit exactly that with a cache that never filled."""
    trace = read_trace(REAL_TRACE)
    assert sum(request.input_tokens for request in trace) == 92_117
    assert infinite_cache_hit_tokens(trace) == 33_600


def test_generated_trace_has_the_shape_of_the_real_one() -> None:
    """About as many tokens, about as many hits, long and short prompts; the same every time."""
    trace = generated_trace(seed=0)
    tokens = sum(request.input_tokens for request in trace)
    assert trace == generated_trace(seed=0)
    assert 60_000 < tokens < 120_000
    assert 0.25 < infinite_cache_hit_tokens(trace) / tokens < 0.5
    assert min(request.input_tokens for request in trace) < 100
    assert 3_000 < max(request.input_tokens for request in trace) < 7_680
    assert len(trace[0].tokens()) == trace[0].input_tokens


def test_equal_ids_are_equal_tokens() -> None:
    """Wherever a block stands, and whole or cut."""
    first = TraceRequest(64, (7, 8)).tokens()
    second = TraceRequest(50, (8, 7)).tokens()
    assert first[32:] == second[:32]
    assert first[:18] == second[32:]
