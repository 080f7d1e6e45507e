"""Every end of a request gives everything back: finish, abort, reset, refusal."""

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from vllm.v1.request import RequestStatus
from vllm_parts import prompt

from opal_connector.integrations.vllm.store_planner import StorePlanner

pytestmark = pytest.mark.vllm


def manual_engine_with(*seeds: int, length: int = 64, **options: object) -> Engine:
    """An engine whose tier holds these prompts, whose device is empty, and that moves nothing."""
    engine = Engine(transfers="manual", **options)
    engine.mover().is_inline = True
    for seed in seeds:
        engine.generate(f"fill{seed}", prompt(seed, length), max_tokens=1)
    engine.forget_device()
    engine.mover().is_inline = False
    return engine


def pins(engine: Engine) -> int:
    """Promises over all objects."""
    (tier,) = engine.manager.storage.tiers
    return sum(tier.get(key).leases for key in tier.index.readable_keys())


def finish_transfers(engine: Engine) -> None:
    """Run what is pending and everything to come."""
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()


def test_ht_47_hit_that_the_device_has_too_leaves_no_lease() -> None:
    """Looked up, then found in the device's own cache: the promise ends."""
    engine = manual_engine_with(1, num_blocks=33)
    engine.add("first", [*prompt(1, 64), 7], max_tokens=2)
    request = engine.add("second", [*prompt(1, 64), 7], max_tokens=2)
    ask = engine.connector.get_num_new_matched_tokens
    assert ask(request, 0) == (64, True)
    assert pins(engine) == 4 // 2

    assert ask(request, 64) == (0, False)
    assert pins(engine) == 0
    finish_transfers(engine)

    engine.assert_answers("first", "second")
    assert engine.results["second"].prefill.num_local_cached_tokens == 64
    engine.assert_idle()


def test_ht_49_one_request_looked_up_twice_is_promised_once() -> None:
    """Lookups are idempotent: any number of them, one end."""
    engine = manual_engine_with(1)
    request = engine.add("a", [*prompt(1, 64), 7])
    for _ in range(3):
        assert engine.connector.get_num_new_matched_tokens(request, 0) == (64, True)
        assert engine.connector.get_num_new_matched_tokens(request, 16) == (48, True)
        engine.manager.check()
    assert engine.manager.lease_count == 1

    engine.abort("a")

    engine.run()
    engine.assert_idle()


def test_abort_before_admission() -> None:
    """A request that never got a block leaves nothing."""
    engine = manual_engine_with(1)
    engine.add("a", prompt(1, 64))
    engine.abort("a")
    engine.run()

    engine.assert_idle()


@pytest.mark.parametrize("when", ["before_the_job_left", "in_flight", "ended"])
def test_abort_while_loading(when: str) -> None:
    """The blocks stay until the load has ended, then they are free; the source is not evicted."""
    engine = manual_engine_with(1, 2, tier_blocks=8)
    held = engine.held_hashes()
    engine.add("a", [*prompt(1, 64), 7])
    engine.step()
    blocks = engine.block_ids("a")
    if when == "ended":
        engine.run_transfers()
    engine.abort("a")
    if when == "before_the_job_left":
        engine.step()
    else:
        engine.add("b", prompt(3, 64), max_tokens=1)
        engine.run_until(lambda: engine.results["b"].finish_reason is not None)
        if when == "in_flight":
            assert not set(blocks) & set(engine.runner.last_block_ids("b"))
            assert engine.half.books.manager.open_job_count >= 1
            assert len(held & engine.held_hashes()) >= 4
    finish_transfers(engine)

    assert engine.results["a"].tokens == []
    engine.assert_idle()
    assert engine.generate("again", [*prompt(1, 64), 7]).tokens == engine.expected("again")
    engine.assert_idle()


def test_abort_while_storing() -> None:
    """The store still completes, from blocks that nobody else has got."""
    engine = manual_engine_with()
    engine.add("a", prompt(1, 64), max_tokens=50)
    engine.step()
    engine.step()
    assert engine.mover().pending_stores

    engine.abort("a")
    finish_transfers(engine)
    engine.forget_device()
    warm = engine.generate("warm", [*prompt(1, 64), 7])

    assert warm.hit_tokens == 64
    engine.assert_answers("warm")
    engine.assert_idle()


def test_abort_while_the_step_runs() -> None:
    """An abort that arrives between a step and its output keeps what the step computed."""
    engine = Engine()
    engine.add("a", prompt(1, 64), max_tokens=50)
    engine.during_step = lambda output: engine.abort("a")
    engine.run()
    engine.during_step = lambda output: None
    engine.forget_device()
    warm = engine.generate("warm", [*prompt(1, 64), 7])

    assert warm.hit_tokens == 64
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize("async_steps", [False, True])
def test_abort_of_everything_then_reset_as_a_pause_does(async_steps: bool) -> None:
    """Aborted at once, the engine drains by itself, and its caches can be reset."""
    engine = Engine(transfers="threads", async_steps=async_steps, num_blocks=33)
    for seed in range(6):
        engine.add(f"r{seed}", prompt(seed % 3, 70), max_tokens=30)
    for _ in range(4):
        engine.step()
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.run()

    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.held_hashes() == set()
    assert engine.manager.storage.tiers[0].used_bytes == 0
    engine.run()
    engine.assert_idle()
    engine.close()


def test_reset_while_storing_leaves_the_tier_empty() -> None:
    """A store that was in flight before the reset does not come back after it."""
    engine = manual_engine_with()
    engine.answer("a", prompt(1, 64), max_tokens=1)
    assert engine.scheduler.reset_connector_cache()
    finish_transfers(engine)

    assert engine.held_hashes() == set()
    assert engine.manager.storage.tiers[0].used_bytes == 0
    engine.forget_device()
    assert engine.generate("warm", prompt(1, 64)).hit_tokens == 0
    engine.assert_answers("a", "warm")
    engine.assert_idle()


def test_reset_while_storing_does_not_stop_later_stores() -> None:
    """A request that goes on behind a reset is stored again, from its head."""
    engine = manual_engine_with()
    engine.add("a", prompt(1, 64), max_tokens=40)
    engine.step()
    engine.step()
    assert engine.scheduler.reset_connector_cache()
    finish_transfers(engine)
    engine.forget_device()

    assert engine.generate("warm", prompt(1, 64)).hit_tokens == 48
    engine.assert_answers("a", "warm")
    engine.assert_idle()


def test_reset_while_loading_ends_well_and_frees_the_rows() -> None:
    """The load was promised its rows; after it they are free, and nothing hits."""
    engine = manual_engine_with(1)
    engine.add("a", [*prompt(1, 64), 7], max_tokens=2)
    engine.step()
    assert engine.scheduler.reset_connector_cache()
    assert engine.held_hashes() == set()
    assert engine.manager.storage.tiers[0].used_bytes > 0
    engine.add("b", [*prompt(1, 64), 8], max_tokens=2)
    engine.step()
    finish_transfers(engine)

    assert engine.results["a"].hit_tokens == 64
    assert engine.results["b"].hit_tokens == 0
    engine.assert_answers("a", "b")
    engine.assert_idle()


def test_reset_between_lookup_and_allocation_recomputes() -> None:
    """The promise is gone when vLLM acts on it: every block is reported as missing."""
    engine = manual_engine_with(1)
    ask = engine.connector.get_num_new_matched_tokens

    def then_reset(request: object, computed_tokens: int) -> tuple[int | None, bool]:
        answer = ask(request, computed_tokens)
        engine.connector.reset_cache()
        return answer

    engine.connector.get_num_new_matched_tokens = then_reset
    engine.add("a", [*prompt(1, 64), 7], max_tokens=2)
    engine.step()
    blocks = engine.block_ids("a")
    engine.connector.get_num_new_matched_tokens = ask
    finish_transfers(engine)

    assert engine.load_errors == [set(blocks)]
    assert engine.results["a"].hit_tokens == 0
    engine.assert_answers("a")
    engine.assert_idle()


def test_device_reset_fails_only_while_a_store_runs() -> None:
    """Held blocks make vLLM's reset fail; the engine keeps stepping until it can succeed."""
    engine = manual_engine_with()
    engine.answer("a", prompt(1, 64), max_tokens=1)
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.has_requests()
    engine.run_transfers()
    engine.run()

    assert engine.scheduler.reset_prefix_cache()
    engine.assert_idle()


def test_skip_reading_asks_nothing_and_still_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """`skip_reading_prefix_cache` (prompt logprobs): no lookup, but the next request hits."""
    engine = Engine()
    asked: list[str] = []
    lookup = engine.manager.lookup
    monkeypatch.setattr(
        engine.manager,
        "lookup",
        lambda request, **more: asked.append(request.request_id) or lookup(request, **more),
    )
    engine.generate("skips", prompt(1, 100), skip_reading=True)
    engine.generate("skips_again", prompt(1, 100), skip_reading=True)
    assert asked == []
    engine.forget_device()

    assert engine.generate("reads", prompt(1, 100)).hit_tokens == 96
    assert engine.results["skips_again"].hit_tokens == 0
    engine.assert_answers("skips", "skips_again", "reads")
    engine.assert_idle()


def test_resumable_request_is_not_cached() -> None:
    """A streaming session may take back tokens that it had: it neither hits nor stores."""
    engine = manual_engine_with(1)
    engine.mover().is_inline = True
    before = engine.held_hashes()
    engine.add("session", prompt(1, 80), max_tokens=3, resumable=True)
    engine.run_until(lambda: engine.results["session"].finish_reason is not None)
    engine.scheduler.add_request(engine.make_request("session", prompt(2, 40), resumable=True))
    for _ in range(10):
        engine.step()
    engine.scheduler.add_request(engine.make_request("session", [1], resumable=False))
    engine.run()

    asked = {a.matched_tokens for a in engine.lookups if a.request_id == "session"}
    assert asked <= {0}
    assert len(engine.results["session"].tokens) == 6
    assert engine.held_hashes() == before
    engine.assert_idle()


def test_consumer_loads_and_never_stores() -> None:
    """`kv_consumer`."""
    engine = Engine(role="kv_consumer")
    engine.generate("cold", prompt(1, 100))
    assert engine.held_hashes() == set()
    assert engine.results["cold"].stored_tokens == 0
    engine.half._stores = StorePlanner(
        engine.half.books, engine.half.holds, engine.half._identified, ranks=1
    )
    engine.generate("stored", prompt(1, 120))  # stands for what another process stored
    engine.half._stores = None
    engine.forget_device()
    before = engine.held_hashes()

    assert engine.generate("warm", [*prompt(1, 100), *prompt(2, 90)]).hit_tokens == 96
    assert engine.held_hashes() == before
    engine.assert_answers("cold", "warm")
    engine.assert_idle()


def test_producer_stores_and_never_loads() -> None:
    """`kv_producer`."""
    engine = Engine(role="kv_producer")
    engine.generate("cold", prompt(1, 100))
    assert len(engine.held_hashes()) == 6
    engine.forget_device()

    assert engine.generate("warm", prompt(1, 100)).hit_tokens == 0
    assert {lookup.matched_tokens for lookup in engine.lookups} == {0}
    engine.assert_answers("cold", "warm")
    engine.assert_idle()


def test_second_handshake_changes_nothing() -> None:
    """A newer vLLM shakes hands again when it wakes up: the books and the hits are still there."""
    engine = Engine()
    engine.generate("cold", prompt(1, 100))
    engine.forget_device()
    books = engine.half.books
    engine.shake_hands()

    assert engine.half.books is books
    assert engine.generate("warm", prompt(1, 100)).hit_tokens == 96
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize("cut", [lambda engine: None, lambda engine: engine.abort("a")])
def test_without_tiers_the_model_runs_uncached(cut: Callable[[Engine], None]) -> None:
    """An empty `kvc_tiers` turns Opal off, without an error."""
    engine = Engine(kvc_tiers=[], audit=False)
    engine.add("a", prompt(1, 100))
    engine.step()
    cut(engine)
    engine.run()

    assert engine.half.books is None
    assert engine.results["a"].params == {}
    assert not engine.connector.has_pending_push_work()
