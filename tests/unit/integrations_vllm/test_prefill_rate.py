"""The measured speed of prefill: that of long prompts, however many short steps come between."""

import pytest

pytest.importorskip("vllm")

from opal_connector.integrations.vllm.load_meter import PrefillRate

OVERHEAD_SECONDS = 0.05
TOKEN_SECONDS = 1 / 2_000


def seconds(tokens: int) -> float:
    return OVERHEAD_SECONDS + tokens * TOKEN_SECONDS


def test_nothing_is_known_before_the_first_step() -> None:
    assert PrefillRate().value is None


def test_an_engine_that_mostly_hits_its_caches_is_not_taken_for_a_slow_one() -> None:
    """Its steps are short, and what a step costs besides its tokens is most of their time."""
    rate = PrefillRate()
    for _ in range(10):
        rate.add(1_000, seconds(1_000))
        for _ in range(10):
            rate.add(40, seconds(40))
    assert rate.value == pytest.approx(1_000 / seconds(1_000), rel=0.15)


def test_a_change_is_seen_after_some_thousand_tokens() -> None:
    rate = PrefillRate()
    for _ in range(20):
        rate.add(1_000, 1.0)
    for _ in range(20):
        rate.add(1_000, 0.1)
    assert rate.value == pytest.approx(10_000, rel=0.5)
    assert rate.value > 5_000
