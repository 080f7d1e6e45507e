"""Progress and exact hit counts: nothing waits for ever, nothing is one block off."""

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from vllm_parts import prompt

pytestmark = pytest.mark.vllm


def warm_hit(engine: Engine, tokens: list[int]) -> int:
    """What the second run of a prompt hits, with right answers in both."""
    engine.generate("cold", tokens)
    engine.forget_device()
    warm = engine.generate("warm", tokens)
    engine.assert_answers("cold", "warm")
    engine.assert_idle()
    return warm.hit_tokens


@pytest.mark.parametrize("transfers", ["inline", "threads"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ht_38_two_loads_that_do_not_fit_together(transfers: str, prefix_caching: bool) -> None:
    """Seven blocks; one request needs 4+1 of them, the other 3+1: both finish."""
    engine = Engine(num_blocks=8, transfers=transfers, prefix_caching=prefix_caching)
    for name, seed, length in (("fill_a", 1, 64), ("fill_b", 2, 48)):
        engine.generate(name, prompt(seed, length), max_tokens=1)
    engine.forget_device()

    engine.add("a", prompt(1, 65), max_tokens=10)
    engine.add("b", prompt(2, 49), max_tokens=10)
    first = len(engine.steps)
    engine.run()

    busy = [step for step in engine.steps[first:] if step.total_num_scheduled_tokens]
    assert len(busy) < 100
    assert engine.results["a"].hit_tokens == 64
    assert engine.results["b"].hit_tokens == 48
    engine.assert_answers("a", "b")
    engine.assert_idle()
    engine.close()


@pytest.mark.parametrize("length", [64, 65, 128, 200, 1000])
@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("chunk_blocks", [1, 8])
def test_ht_39_chunked_prefill_is_stored_whole(
    length: int, block_tokens: int, chunk_blocks: int
) -> None:
    """64 tokens a step: the second run hits all whole blocks but the last token's."""
    engine = Engine(
        block_tokens=block_tokens, chunk_blocks=chunk_blocks, batch_tokens=64, num_blocks=70
    )

    assert warm_hit(engine, prompt(1, length)) == (length - 1) // block_tokens * block_tokens


@pytest.mark.parametrize("length", [16, 32, 64, 128])
def test_ht_40_full_hit_leaves_a_token_to_compute(length: int) -> None:
    """A prompt that is stored to its last token still has one block computed."""
    engine = Engine(chunk_blocks=4)

    assert warm_hit(engine, prompt(1, length)) == length - 16


@pytest.mark.parametrize(("local_tokens", "expected"), [(16, 32), (32, 16), (48, 0)])
def test_ht_42_answer_counts_beyond_the_local_hit(local_tokens: int, expected: int) -> None:
    """Of 48 stored tokens, those that the device already has are not counted."""
    engine = Engine(chunk_blocks=1)
    engine.generate("cold", prompt(1, 49), max_tokens=1)
    engine.forget_device()
    engine.generate("local", prompt(1, local_tokens), max_tokens=1)

    warm = engine.generate("warm", prompt(1, 49))

    assert engine.lookups[-1].computed_tokens == local_tokens
    assert engine.lookups[-1].matched_tokens == expected
    assert warm.hit_tokens == expected
    assert warm.prefill.num_local_cached_tokens == local_tokens
    assert warm.prefill.num_external_cached_tokens == expected
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)]
)
def test_ht_43_one_token_more_is_one_block_more(length: int, expected: int) -> None:
    """17 tokens hit 16, 16 tokens hit none."""
    assert warm_hit(Engine(chunk_blocks=1), prompt(1, length)) == expected


@pytest.mark.parametrize(("length", "expected"), [(100, 80), (65, 48), (64, 32), (32, 0), (9, 0)])
def test_last_block_of_a_hit_is_left_to_a_draft_model(length: int, expected: int) -> None:
    """Its last token's draft KV depends on the token behind it, wherever the hit ends."""
    engine = Engine(is_eagle=True, chunk_blocks=1)
    engine.generate("cold", prompt(1, 200))
    engine.forget_device()
    for name, tokens in (("same", prompt(1, length)), ("parts", prompt(1, length - 1) + [7] * 99)):
        warm = engine.generate(name, tokens)
        assert warm.hit_tokens == expected
        assert warm.prefill.num_external_cached_tokens == expected
        engine.assert_answers(name)
        engine.forget_device()
    engine.assert_idle()


@pytest.mark.parametrize("transfers", ["inline", "threads"])
def test_ht_45_nothing_is_left_of_a_thousand_requests(transfers: str) -> None:
    """Short, long, repeated, aborted: per-request state returns to zero."""
    engine = Engine(
        num_blocks=129, tier_blocks=64, max_requests=64, audit=False, transfers=transfers
    )
    for number in range(1000):
        engine.add(f"r{number}", prompt(number % 150, 1 + number * 7 % 90), max_tokens=1)
        if number % 64 == 63:
            engine.step()
            engine.abort(f"r{number - 32}")
    engine.run(max_steps=20_000)

    assert sum(result.finish_reason == "length" for result in engine.results.values()) > 980
    engine.assert_answers("r0", "r150", "r999")
    engine.assert_idle()
    engine.close()


@pytest.mark.parametrize("async_steps", [False, True])
def test_ht_46_slow_stores_do_not_stop_the_engine(async_steps: bool) -> None:
    """Every preempted request's blocks are held by a store that ends much later."""
    engine = Engine(
        num_blocks=25, async_steps=async_steps, transfers="manual", prefix_caching=False
    )
    names = [f"r{seed}" for seed in range(8)]
    for seed, name in enumerate(names):
        engine.add(name, prompt(seed, 40), max_tokens=60)
    for count in range(4000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        engine.clock.now += 0.01
        if count % 20 == 19:
            engine.run_transfers()
    engine.run_transfers()
    engine.run()

    preemptions = sum(request.num_preemptions for request in engine.requests.values())
    assert 0 < preemptions < 60
    engine.assert_answers(*names)
    engine.assert_idle()


def test_ht_46_store_that_never_ends_costs_a_bounded_wait() -> None:
    """A running request waits a second for held blocks, then vLLM preempts as usual."""
    engine = Engine(num_blocks=17, transfers="manual", prefix_caching=False)
    engine.answer("gone", prompt(9, 64), max_tokens=1)  # its blocks stay held
    engine.add("a", prompt(1, 90), max_tokens=60)
    engine.add("b", prompt(2, 60), max_tokens=60)
    engine.mover().is_inline = True
    engine.run_until(lambda: not engine.steps[-1].total_num_scheduled_tokens)
    for _ in range(5):
        assert not engine.step().total_num_scheduled_tokens
    assert engine.requests["b"].num_preemptions == 0

    engine.clock.now += 1.01
    assert engine.step().total_num_scheduled_tokens
    engine.run_until(lambda: engine.results["b"].finish_reason is not None)
    engine.run_transfers()
    engine.run()
    engine.assert_answers("a", "b")
    engine.assert_idle()


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_gate_bounds_the_requests_that_fetch_or_are_ready(limit: int) -> None:
    """`max_kvc_ready_requests`: the others are told to ask again, and all finish."""
    engine = Engine(transfers="manual", max_kvc_ready_requests=limit, num_blocks=129)
    engine.mover().is_inline = True
    names = [f"r{seed}" for seed in range(8)]
    for seed in range(8):
        engine.generate(f"cold{seed}", prompt(seed, 60))
    engine.forget_device()
    engine.mover().is_inline = False
    for seed, name in enumerate(names):
        engine.add(name, prompt(seed, 60))
    most = 0
    for count in range(200):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        fetching = [
            name
            for name in names
            if engine.requests[name].status.name == "WAITING_FOR_REMOTE_KVS"
            or (engine.requests[name].status.name == "WAITING" and name in engine.half._fetching)
        ]
        most = max(most, len(fetching))
        if count % 3 == 2:
            engine.run_transfers()

    assert most == limit
    assert all(engine.results[name].hit_tokens == 48 for name in names)
    assert any(lookup.matched_tokens is None for lookup in engine.lookups)
    engine.assert_answers(*names)
    engine.assert_idle()


def test_gate_opens_when_a_fetched_request_begins() -> None:
    """What is running is not fetching: the next one need not wait for its end."""
    engine = Engine(max_kvc_ready_requests=1)
    for seed in range(2):
        engine.generate(f"cold{seed}", prompt(seed, 60))
    engine.forget_device()
    engine.add("long", prompt(0, 60), max_tokens=50)
    engine.add("next", prompt(1, 60), max_tokens=2)
    engine.run_until(lambda: engine.results["next"].finish_reason is not None)

    assert engine.results["next"].hit_tokens == 48
    assert 0 < len(engine.results["long"].tokens) < 10
    engine.run()
    engine.assert_answers("long", "next")
    engine.assert_idle()


def test_gate_counts_requests_that_a_reset_preempted() -> None:
    """Preempted and admitted to a load in one step, a request still counts as fetching."""
    engine = Engine(transfers="manual", max_kvc_ready_requests=1)
    engine.mover().is_inline = True
    names = ["a", "b", "c"]
    for seed, name in enumerate(names):
        engine.add(name, prompt(seed, 60), max_tokens=20)
    for _ in range(2):
        engine.step()
    engine.mover().is_inline = False
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    for _ in range(4):
        engine.step()
        loading = [job.request_id for job in engine.mover().pending_loads]
        assert loading == ["a"]
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    engine.assert_answers(*names)
    engine.assert_idle()


def test_blocks_held_for_stores_are_bounded() -> None:
    """However slow the tier, most of the device is left to the requests."""
    engine = Engine(num_blocks=101, transfers="manual", batch_tokens=64, max_requests=4)
    names = [f"r{seed}" for seed in range(12)]
    for seed, name in enumerate(names):
        engine.add(name, prompt(seed, 150), max_tokens=2)
    most = 0
    for _ in range(400):
        if all(engine.results[name].finish_reason for name in names):
            break
        engine.step()
        engine.clock.now += 0.1
        most = max(most, len(engine.half.holds))

    assert all(engine.results[name].finish_reason for name in names)
    assert 0 < most <= 60
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()
    engine.assert_answers(*names)
    engine.assert_idle()
