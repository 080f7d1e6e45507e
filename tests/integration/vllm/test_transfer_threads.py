"""The real transfer threads, stopped in the middle of a transfer by a gate that the test opens."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from transfer_fakes import GatedTier
from vllm_parts import prompt

pytestmark = pytest.mark.vllm


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with little room; its tier's gate is open."""
    engine = Engine(num_blocks=13, transfers="threads", wrap_tier=GatedTier)
    engine.tier().gate.set()
    yield engine
    engine.tier().gate.set()
    engine.close()


def test_ht_01_store_stuck_in_the_tier_reads_the_bytes_of_its_step(engine: Engine) -> None:
    """A thread that waits before it copies finds the blocks as its request left them."""
    tier = engine.tier()
    tier.gate.clear()
    engine.answer("a", prompt(1, 64), max_tokens=1)
    assert tier.entered.wait(10)
    for seed in range(2, 6):
        engine.answer(f"other{seed}", prompt(seed, 30), max_tokens=1)
    tier.gate.set()
    engine.run()
    engine.forget_device()

    assert engine.generate("again", [*prompt(1, 64), 7]).hit_tokens == 64
    engine.assert_answers("again", "other2", "other5")
    engine.assert_idle()


def test_abort_while_a_thread_fills_the_blocks(engine: Engine) -> None:
    """Nobody gets the blocks before the thread has ended."""
    engine.generate("fill", prompt(1, 64), max_tokens=1)
    engine.forget_device()
    tier = engine.tier()
    tier.gate.clear()
    tier.entered.clear()
    engine.add("a", [*prompt(1, 64), 7])
    engine.step()
    blocks = set(engine.block_ids("a"))
    assert tier.entered.wait(10)
    engine.abort("a")
    engine.add("b", prompt(2, 100), max_tokens=8)
    engine.run_until(lambda: engine.results["b"].finish_reason is not None)
    assert not blocks & set(engine.runner.last_block_ids("b"))

    tier.gate.set()
    engine.run()

    engine.assert_answers("b")
    assert engine.generate("again", [*prompt(1, 64), 7]).hit_tokens == 64
    engine.assert_answers("again")
    engine.assert_idle()


def test_shutdown_does_not_wait_for_a_stuck_thread(engine: Engine) -> None:
    """The engine ends within seconds, whatever a tier does."""
    engine.tier().gate.clear()
    engine.answer("a", prompt(1, 64), max_tokens=1)
    assert engine.tier().entered.wait(10)

    assert not engine.mover().close(timeout_seconds=0.1)

    engine.assert_answers("a")
