"""The scheduler's protocol: preemption, eviction between two hooks, failing loads."""

import errno
from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from transfer_fakes import FailingTier
from vllm_parts import prompt

from opal_connector.keys import OpalTokenDatabase

pytestmark = pytest.mark.vllm


def matched(engine: Engine, request_id: str) -> list[int | None]:
    """All answers to vLLM's questions about a request."""
    return [lookup.matched_tokens for lookup in engine.lookups if lookup.request_id == request_id]


def chain_of(engine: Engine, request_id: str) -> list[bytes]:
    """The block hashes of all tokens that a request really has."""
    chain = OpalTokenDatabase(block_tokens=engine.block_tokens, chunk_blocks=1).chain()
    chain.extend(list(engine.requests[request_id].all_token_ids))
    return chain.hashes


def preempt_all(engine: Engine, *, reset_tiers: bool = False) -> None:
    """Take the running requests' blocks away, as vLLM does when it resets its cache."""
    assert engine.scheduler.reset_prefix_cache(
        reset_running_requests=True, reset_connector=reset_tiers
    )


@pytest.mark.parametrize("v2_runner", [False, True])
def test_ht_29_readmission_waits_for_the_store_in_flight(v2_runner: bool) -> None:
    """A preempted request whose blocks are still being stored is told to come again."""
    engine = Engine(transfers="manual", num_blocks=9, prefix_caching=False, v2_runner=v2_runner)
    engine.add("a", prompt(1, 60), max_tokens=40)
    engine.add("b", prompt(2, 60), max_tokens=40)
    engine.run_until(lambda: engine.requests["b"].num_preemptions > 0)
    store_of_b = [job for job in engine.mover().pending_stores if job.job_id > 1]
    assert store_of_b
    del engine.lookups[:]

    engine.abort("a")
    for _ in range(5):
        engine.step()
    assert set(matched(engine, "b")) == {None}
    assert engine.connector.has_pending_push_work()
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    assert matched(engine, "b")[-1] == 64
    engine.assert_answers("b")
    engine.assert_idle()


def test_ht_29_wait_for_a_store_that_never_ends_is_bounded() -> None:
    """After a second the request is computed instead."""
    engine = Engine(transfers="manual", prefix_caching=False)
    engine.answer("a", prompt(1, 64), max_tokens=1)
    engine.add("b", prompt(1, 64), max_tokens=2)
    for _ in range(3):
        engine.step()
    assert matched(engine, "b") == [None] * 3

    engine.clock.now += 1.01
    engine.run_until(lambda: engine.results["b"].finish_reason is not None)

    assert matched(engine, "b")[-1] == 0
    engine.assert_answers("b")
    engine.run_transfers()
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize("v2_runner", [False, True])
@pytest.mark.parametrize("reset_tiers", [False, True])
def test_ht_30_resume_with_fewer_blocks_stores_what_it_has(
    reset_tiers: bool, v2_runner: bool
) -> None:
    """After a preemption the store cursor goes back to what the new block table holds."""
    engine = Engine(batch_tokens=64, v2_runner=v2_runner)
    engine.add("a", prompt(1, 256), max_tokens=3)
    for _ in range(2):
        engine.step()
    assert len(engine.held_hashes()) == 8

    preempt_all(engine, reset_tiers=reset_tiers)
    engine.step()
    assert len(engine.held_hashes()) == (4 if reset_tiers else 8)
    engine.run()

    assert engine.held_hashes() == set(chain_of(engine, "a")[:16])
    engine.assert_answers("a")
    engine.forget_device()
    assert engine.generate("again", prompt(1, 256)).hit_tokens == 240
    engine.assert_answers("again")
    engine.assert_idle()


def test_ht_31_hit_is_kept_between_lookup_and_allocation() -> None:
    """What a lookup promised is not evicted while the device has no room for the request."""
    engine = Engine(tier_blocks=18, num_blocks=17)
    engine.generate("fill", prompt(1, 128), max_tokens=1)
    engine.forget_device()
    promised = engine.held_hashes()
    engine.add("b", prompt(2, 160), max_tokens=80)  # ten blocks of sixteen, and growing
    engine.step()
    engine.add("a", [*prompt(1, 128), 7], max_tokens=2)  # nine blocks
    for _ in range(70):
        engine.step()
    assert set(matched(engine, "a")) == {128}
    assert promised < engine.held_hashes()
    assert len(engine.held_hashes()) == 18  # b had to give up two chunks more
    engine.run()

    assert engine.results["a"].hit_tokens == 128
    engine.assert_answers("a", "b")
    engine.assert_idle()


def test_ht_31_promise_ends_with_a_request_that_is_never_admitted() -> None:
    """The lease of a request that goes away does not keep its chunks for ever."""
    engine = Engine(tier_blocks=8, num_blocks=17)
    engine.generate("fill", prompt(1, 128), max_tokens=1)
    engine.forget_device()
    promised = engine.held_hashes()
    engine.add("b", prompt(2, 160), max_tokens=60)
    engine.step()
    engine.add("a", [*prompt(1, 128), 7], max_tokens=2)
    engine.step()
    assert engine.manager.lease_count == 1

    engine.abort("a")
    assert engine.manager.lease_count == 0
    engine.run()

    assert not promised <= engine.held_hashes()
    engine.assert_answers("b")
    engine.assert_idle()


@pytest.mark.parametrize("taken_tokens", [80, 72, 65, 64, 40, 16, 8, 1])
def test_vllm_may_take_less_than_was_promised(
    taken_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions cap a hit, maybe inside a block: that block is loaded too."""
    engine = Engine()
    engine.generate("cold", prompt(1, 80), max_tokens=1)
    engine.forget_device()
    ask = engine.connector.get_num_new_matched_tokens

    def take_less(request: object, computed_tokens: int) -> tuple[int | None, bool]:
        assert ask(request, computed_tokens) == (80, True)
        return taken_tokens, True

    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", take_less)
    warm = engine.generate("warm", prompt(1, 100), max_tokens=3)

    assert engine.load_errors == []
    assert taken_tokens <= warm.hit_tokens < taken_tokens + 16
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize("promised_blocks", [5, 6])
def test_ht_32_more_than_the_lease_holds_is_named_as_missing(
    promised_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM expects more blocks than the books can fill: these are load errors, not an assert."""
    engine = Engine()
    engine.generate("cold", prompt(1, 80), max_tokens=1)
    engine.forget_device()
    ask = engine.connector.get_num_new_matched_tokens
    answers = iter([True])

    def promise_too_much(request: object, computed_tokens: int) -> tuple[int | None, bool]:
        found, is_async = ask(request, computed_tokens)
        return (promised_blocks * 16, True) if next(answers, False) else (found, is_async)

    monkeypatch.setattr(engine.connector, "get_num_new_matched_tokens", promise_too_much)
    engine.add("warm", prompt(1, 100), max_tokens=3)
    engine.step()
    blocks = engine.block_ids("warm")
    engine.run()

    assert [len(errors) for errors in engine.load_errors] == [1] * (promised_blocks > 5)
    assert not engine.load_errors or engine.load_errors[0] == {blocks[5]}
    assert engine.results["warm"].hit_tokens == 80
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"spec_tokens": 3}, id="drafts"),
        pytest.param({"async_steps": True}, id="async"),
        pytest.param({"async_steps": True, "v2_runner": True, "num_blocks": 14}, id="async_v2"),
        pytest.param({"spec_tokens": 4, "num_blocks": 14}, id="drafts_preempted"),
    ],
)
def test_ht_32_only_tokens_of_the_request_are_stored(options: dict[str, int]) -> None:
    """Whatever was drafted, or is ahead of its output, no token is stored that never was."""
    engine = Engine(chunk_blocks=1, **options)
    names = [f"r{seed}" for seed in range(4)]
    for seed, name in enumerate(names):
        engine.add(name, prompt(seed, 45), max_tokens=50)
    engine.run()

    real = {block_hash for name in names for block_hash in chain_of(engine, name)}
    assert engine.held_hashes() <= real
    assert len(engine.held_hashes()) >= len(names) * 5
    engine.assert_answers(*names)
    engine.assert_idle()


@pytest.mark.parametrize("bad_chunk", [0, 2])
@pytest.mark.parametrize("kind", ["damage", "fault", "reset"])
def test_ht_34_object_lost_behind_the_lookup_costs_few_retries(kind: str, bad_chunk: int) -> None:
    """A hit that can no longer be loaded is no hit the next time; what precedes it still is."""
    engine = Engine(wrap_tier=FailingTier, transfers="manual")
    engine.mover().is_inline = True
    engine.generate("cold", prompt(1, 170))
    engine.forget_device()
    engine.mover().is_inline = False
    engine.add("warm", prompt(1, 170))
    engine.step()
    (load,) = engine.mover().pending_loads
    if kind == "damage":
        engine.tier().tier.rows[load.objects[bad_chunk].tier_rows[0], 3] ^= 255
    elif kind == "fault":
        engine.tier().bad_hashes = {load.objects[bad_chunk].stamps[:32]}
    else:
        assert engine.scheduler.reset_connector_cache()
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    assert len(matched(engine, "warm")) <= 4
    engine.assert_answers("warm")
    if kind == "reset":
        assert engine.results["warm"].hit_tokens == 160  # the load had begun before the reset
        return
    assert engine.results["warm"].hit_tokens == 32 * bad_chunk
    if kind == "damage":
        engine.forget_device()
        assert engine.generate("again", prompt(1, 170)).hit_tokens == 160  # rewritten
    else:
        engine.forget_device()
        engine.answer("other", prompt(1, 170))  # the medium still fails: rewritten and lost again
        assert engine.results["other"].hit_tokens == 32 * bad_chunk
    engine.run()
    engine.assert_idle()


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EIO, "Input/output error"),
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
        KeyError("gone"),
        AssertionError("inside the tier"),
    ],
    ids=lambda error: f"{type(error).__name__}{getattr(error, 'errno', None) or ''}",
)
@pytest.mark.parametrize("verb", ["read", "write"])
def test_ht_35_fault_of_a_tier_is_a_miss(error: Exception, verb: str) -> None:
    """Whatever a tier raises, the engine lives and the request is right."""
    engine = Engine(wrap_tier=FailingTier)
    tier = engine.tier()

    def failing(fails: bool) -> Callable[[object], bool]:
        return lambda item: fails

    def raise_error() -> Exception:
        return error

    tier.error = raise_error
    tier.fails_write = failing(verb == "write")
    engine.generate("cold", prompt(1, 100))
    engine.forget_device()
    tier.fails_read = failing(verb == "read")
    warm = engine.generate("warm", prompt(1, 100))
    assert warm.hit_tokens == 0
    tier.fails_write = tier.fails_read = failing(False)
    engine.generate("heal", prompt(1, 100))
    engine.forget_device()

    assert engine.generate("again", prompt(1, 100)).hit_tokens == 96
    engine.assert_answers("cold", "warm", "heal", "again")
    engine.assert_idle()


def test_store_needs_no_allocation_that_the_connector_was_told_of() -> None:
    """Beside another connector it hears of no blocks where the other one loads: it asks vLLM.

    Half of the prompt is on the device, and the blocks that follow were in use before.
    """
    engine = Engine(num_blocks=17)
    engine.generate("old", prompt(3, 250), max_tokens=1)
    engine.generate("half", prompt(1, 64), max_tokens=1)
    engine.scheduler.connector.reset_cache()
    tell = engine.connector.update_state_after_alloc
    engine.connector.update_state_after_alloc = lambda request, blocks, external_tokens: tell(
        request, blocks.new_empty(), 0
    )

    engine.generate("whole", prompt(1, 160), max_tokens=1)

    assert engine.held_hashes() == set(chain_of(engine, "whole")[:10])
    engine.connector.update_state_after_alloc = tell
    engine.forget_device()
    assert engine.generate("again", prompt(1, 160)).hit_tokens == 144
    engine.assert_answers("whole", "again")
    engine.assert_idle()
