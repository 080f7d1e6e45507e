"""What OpenAI's own client makes of a router that has no room, or nobody to ask."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("openai")

import openai
from fake_engine import MODEL, FakeEngine
from router_world import World, eventually, run, world

ASKED: dict[str, Any] = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 2}


def client_of(made: World, *, retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{made.url}/v1",
        api_key="none",
        max_retries=retries,
        timeout=20,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),  # no proxies to this machine
    )


def test_a_full_router_is_a_rate_limit_that_the_client_waits_out() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        one.step = asyncio.Semaphore(0)
        async with (
            world(one, queue={"max_in_flight": 1, "max_queue": 0}) as made,
            client_of(made) as hasty,
            client_of(made, retries=2) as patient,
        ):
            first = asyncio.ensure_future(_whole(hasty))
            await eventually(lambda: one.running == 1)
            with pytest.raises(openai.RateLimitError) as caught:
                await hasty.completions.create(**ASKED)
            assert caught.value.response.headers["Retry-After"] == "1"
            assert caught.value.body["type"] == "rate_limit_error"  # type: ignore[index, call-overload]
            second = asyncio.ensure_future(patient.completions.create(**ASKED))
            counts = made.core.forwarder.counts
            await eventually(lambda: counts["answer", "429"] == 2, "its first attempt")
            for _ in range(100):
                one.step.release()
            assert await first == "t0t1"
            assert (await second).choices[0].text == "xx"
            made.assert_nothing_is_counted()

    run(body())


async def _whole(client: openai.AsyncOpenAI) -> str:
    pieces = await client.completions.create(**ASKED, stream=True)
    return "".join([chunk.choices[0].text async for chunk in pieces if chunk.choices])


def test_with_nobody_to_ask_it_is_a_server_error_until_somebody_is_back() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            await one.stop_listening()
            async with client_of(made) as client:
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.completions.create(**ASKED)
                assert caught.value.status_code == 503
                assert int(caught.value.response.headers["Retry-After"]) >= 1
                with pytest.raises(openai.InternalServerError):
                    await client.models.list()
            async with client_of(made, retries=3) as patient:
                answer = asyncio.ensure_future(patient.completions.create(**ASKED))
                counts = made.core.forwarder.counts
                before = counts["answer", "503"]
                await eventually(lambda: counts["answer", "503"] > before, "its first attempt")
                await one.listen()
                assert (await answer).choices[0].text == "xx"
            made.assert_nothing_is_counted()

    run(body())


def test_an_answer_that_breaks_off_is_an_error_and_no_short_answer() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made, client_of(made) as client:
            one.fault = "reset_mid_stream"
            pieces = await client.completions.create(**{**ASKED, "max_tokens": 5}, stream=True)
            with pytest.raises(openai.APIError):
                [chunk async for chunk in pieces]
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()

    run(body())
