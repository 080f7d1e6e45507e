"""What was expected against what was there, and what cold prompts that come together do."""

import asyncio
import random

import pytest
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

from opal_connector.events import DEVICE_TIER

PROMPT = list(range(321))  # twenty blocks and a token


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_that_tells_its_cached_tokens_is_compared(stream: bool) -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            for _ in range(3):
                async with made.post({"prompt": PROMPT, "stream": stream}) as answer:
                    await answer.read()
                await made.knows(one, PROMPT)
            found = made.core.audit.workers["one"]
            assert (found.requests, found.expected_tokens, found.actual_tokens) == (3, 640, 640)
            assert found.trust == 1.0
            assert found.differences.buckets()[-1][1] == 3

    run(body())


def test_answers_that_do_not_tell_are_not_counted() -> None:
    async def body() -> None:
        one = FakeEngine("one", says_cached=False)
        async with world(one) as made:
            for stream in (False, True):
                async with made.post({"prompt": PROMPT, "stream": stream}) as answer:
                    await answer.read()
            await made.post(b"{")
            assert not made.core.audit.workers
            assert made.core.audit.uncounted == 2

    run(body())


def test_an_engine_that_lost_its_cache_silently_is_found_out_and_compared_anew() -> None:
    """Its events still promise the blocks: the answers show that they are not there."""

    async def body() -> None:
        one = FakeEngine("one", is_cache_on=False)
        audit = {"weight": 0.5, "least_trust": 0.5, "least_requests": 3, "resync_seconds": 60.0}
        async with world(one, audit=audit) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            one.lose_silently()
            source = made.core.sources.feed.statuses()[0]
            before = source.metrics.snapshots
            for _ in range(5):
                await made.ask(PROMPT)
            found = made.core.audit.workers["one"]
            assert found.trust < 0.5
            assert found.resyncs == 1
            await eventually(lambda: source.metrics.snapshots == before + 1, "a comparison")

    run(body())


def test_what_the_index_lost_comes_back_with_a_comparison() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            made.core.index.clear_tier("one", DEVICE_TIER)
            assert made.core.sources.feed.resync("one")
            await made.knows(one, PROMPT)
            assert not made.core.sources.feed.resync("nobody")

    run(body())


def test_eight_equal_cold_prompts_at_once_are_computed_once() -> None:
    async def body() -> None:
        engines = [FakeEngine(str(number), prefill_tokens_per_second=5_000) for number in range(3)]
        async with world(*engines) as made:
            answers = await asyncio.gather(*(made.ask(PROMPT) for _ in range(8)))
            assert {status for status, _, _ in answers} == {200}
            assert len({worker for _, worker, _ in answers}) == 1
            # The seven others find all whole blocks, and compute what is behind them.
            assert sum(engine.prefilled_tokens for engine in engines) == 321 + 7
            made.assert_nothing_is_counted()

    run(body())


def test_eight_different_cold_prompts_at_once_are_spread() -> None:
    async def body() -> None:
        engines = [FakeEngine(str(number), prefill_tokens_per_second=5_000) for number in range(4)]
        async with world(*engines) as made:
            await asyncio.gather(*(made.ask([number] * 320) for number in range(8)))
            assert [len(engine.seen) for engine in engines] == [2] * 4

    run(body())


@pytest.mark.parametrize("seed", range(4))
def test_after_any_mix_of_requests_and_faults_nothing_is_left_in_any_book(seed: int) -> None:
    async def body() -> None:
        generator = random.Random(seed)
        engines = [FakeEngine(str(number), token_seconds=0.001) for number in range(3)]
        async with world(
            *engines,
            queue={"max_in_flight": 4, "max_queue": 8, "queue_timeout_seconds": 0.2},
            limits={"first_byte_timeout_seconds": 0.3, "request_timeout_seconds": 1.0},
            breaker={"open_seconds": 0.05, "failures": 3},
        ) as made:
            asked = []
            for _ in range(120):
                asked.append(asyncio.ensure_future(_one(made, generator)))
                if generator.random() < 0.2:
                    engine = generator.choice(engines)
                    faults = [None, None, "reset", "reset_mid_stream", "hang", "garbage", 500, 503]
                    engine.fault, engine.fault_count = generator.choice(faults), 3
                if generator.random() < 0.05:
                    await generator.choice(engines).restart()
                if generator.random() < 0.2:
                    generator.choice(asked).cancel()
                await asyncio.sleep(generator.random() * 0.01)
            statuses = await asyncio.gather(*asked, return_exceptions=True)
            assert 200 in statuses
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()
            for engine in engines:
                engine.fault = None
            for predictions in made.core.router._predictions.values():
                predictions.expire(float("inf"))
                assert len(predictions) == 0
            made.core.index.check()

    run(body())


async def _one(made: World, generator: random.Random) -> int:
    """A request as anybody may send one."""
    prompt = [generator.randrange(4)] * generator.randrange(1, 300)
    asked = {
        "prompt": prompt,
        "stream": generator.random() < 0.5,
        "max_tokens": generator.randrange(1, 30),
        "user": generator.choice(["a", "b", None]),
    }
    async with made.post(asked if generator.random() < 0.9 else b"{") as answer:
        await answer.read()
        return answer.status
