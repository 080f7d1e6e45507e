"""Requests through the router to fake engines with real events."""

from fake_engine import FakeEngine
from router_world import run, world

PROMPT = list(range(320))


def test_a_prompt_goes_where_the_events_say_that_it_is() -> None:
    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two")) as made:
            for engine in reversed(made.engines):
                tokens = [*PROMPT, ord(engine.name[0])]
                engine.store(tokens)
                await made.knows(engine, tokens)
                status, worker, answer = await made.ask(tokens)
                assert (status, worker) == (200, engine.name)
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 320
                engine._cache.clear()
            made.assert_nothing_is_counted()

    run(body())
