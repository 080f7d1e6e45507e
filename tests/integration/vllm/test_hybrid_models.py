"""Models that do not attend to everything everywhere: served right, or left alone with a reason."""

import random
from pathlib import Path

import pytest
from checks import assert_at_rest, assert_same
from engine_process import Answer, EngineProcess, opal, running_engine
from prompts import greedy, request
from tiny_hybrid import VOCABULARY, WINDOW_TOKENS, make_tiny_gemma

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SLIDING = "sliding_attention"
FULL = "full_attention"


def prompts() -> list[list[int]]:
    """Several windows long, one prefix of two in common."""
    rng = random.Random(9)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(5 * WINDOW_TOKENS + 10)]
    tails = [[rng.randrange(3, VOCABULARY) for _ in range(size)] for size in (150, 300, 20)]
    return [shared + tails[0], shared + tails[1], tails[2]]


def two_rounds(engine: EngineProcess) -> list[list[Answer]]:
    """The prompts at once, twice, with an empty device cache."""
    requests = [request(tokens, sampling=greedy(30)) for tokens in prompts()]
    rounds = []
    for _ in range(2):
        rounds.append(engine.generate(requests))
        engine.reset_device()
    return rounds


def test_windows_and_full_attention(tmp_path: Path) -> None:
    """Such a model keeps vLLM's hybrid memory manager, and its blocks of every kind come back."""
    model = make_tiny_gemma(tmp_path, [SLIDING, SLIDING, SLIDING, FULL])
    with running_engine(model=model, skip_tokenizer_init=True) as engine:
        kv_groups = engine.call("kv_groups")
        assert len(kv_groups) > 1
        expected, _ = two_rounds(engine)
    with running_engine(model=model, skip_tokenizer_init=True, kv_transfer_config=opal()) as engine:
        assert engine.call("kv_groups") == kv_groups
        cold, warm = two_rounds(engine)
        assert_at_rest(engine)
        assert "hybrid memory manager is off" not in engine.log_text()

    assert_same(cold, expected)
    assert_same(warm, expected)
    assert [answer["cached_tokens"] for answer in warm] == [448, 608, 0]
    assert warm[1]["opal"]["hit_tokens"]["CPUMemory"] > 0
    assert len({token for answer in expected for token in answer["tokens"]}) > 10


def test_windows_as_full_attention(tmp_path: Path) -> None:
    """Without the hybrid manager one group keeps everything: served whole, and a warning why."""
    model = make_tiny_gemma(tmp_path, [SLIDING, SLIDING, SLIDING, FULL])
    options = {"skip_tokenizer_init": True, "disable_hybrid_kv_cache_manager": True}
    with running_engine(model=model, **options) as engine:
        expected, _ = two_rounds(engine)
    with running_engine(model=model, kv_transfer_config=opal(), **options) as engine:
        assert engine.call("kv_groups") == ["FullAttentionSpec"]
        cold, warm = two_rounds(engine)
        assert_at_rest(engine)
        log = engine.log_text()

    assert_same(cold, expected)
    assert_same(warm, expected)
    assert [answer["cached_tokens"] for answer in warm] == [448, 608, 0]
    warning = f"hybrid memory manager is off, and this model has sliding windows of {WINDOW_TOKENS}"
    assert log.count(warning) == 1


def test_windows_only(tmp_path: Path) -> None:
    """One group that never looks back on everything: a window at the end of a hit is enough."""
    model = make_tiny_gemma(tmp_path, [SLIDING, SLIDING])
    with running_engine(model=model, skip_tokenizer_init=True) as engine:
        expected, _ = two_rounds(engine)
    with running_engine(model=model, skip_tokenizer_init=True, kv_transfer_config=opal()) as engine:
        cold, warm = two_rounds(engine)
        assert_at_rest(engine)

    assert_same(cold, expected)
    assert_same(warm, expected)
    assert [answer["cached_tokens"] for answer in warm] == [448, 608, 0]
