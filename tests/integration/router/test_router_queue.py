"""How many requests an instance gets, who waits, who is refused, and how it all ends."""

import asyncio
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

PROMPT = list(range(320))


def hold(engine: FakeEngine) -> None:
    """Requests at the engine wait from now on until `let_go`."""
    engine.step = asyncio.Semaphore(0)


def let_go(engine: FakeEngine) -> None:
    assert engine.step is not None
    for _ in range(10_000):
        engine.step.release()


def streaming(made: World, number: int) -> "asyncio.Task[int]":
    async def ask() -> int:
        async with made.post({"prompt": [number] * 40, "stream": True}) as answer:
            await answer.read()
            return answer.status

    return asyncio.ensure_future(ask())


def test_an_instance_gets_no_more_than_it_may_and_the_others_wait_in_order() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, queue={"max_in_flight": 2}) as made:
            hold(one)
            asked = []
            for number in range(6):
                asked.append(streaming(made, number))
                await eventually(lambda n=number: made.core.forwarder.under_way == n + 1)
            assert made.core.admission.waiting == 4
            await eventually(lambda: one.running == 2)
            let_go(one)
            assert await asyncio.gather(*asked) == [200] * 6
            sent = [raw.split(b"[")[1].split(b",")[0] for _, _, raw in one.seen]
            assert sent == [str(number).encode() for number in range(6)]
            made.assert_nothing_is_counted()

    run(body())


def test_more_than_may_wait_are_told_so_at_once() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, queue={"max_in_flight": 1, "max_queue": 1}) as made:
            hold(one)
            first = streaming(made, 0)
            await eventually(lambda: one.running == 1)
            second = streaming(made, 1)
            await eventually(lambda: made.core.admission.waiting == 1)
            async with made.post({"prompt": PROMPT}) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert (await answer.json())["error"]["type"] == "rate_limit_error"
            let_go(one)
            assert await asyncio.gather(first, second) == [200, 200]
            made.assert_nothing_is_counted()

    run(body())


def test_who_waits_too_long_is_sent_away_and_who_goes_away_waits_no_more() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        queue = {"max_in_flight": 1, "queue_timeout_seconds": 0.2}
        async with world(one, queue=queue) as made:
            hold(one)
            first = streaming(made, 0)
            await eventually(lambda: one.running == 1)
            gone = streaming(made, 1)
            await eventually(lambda: made.core.admission.waiting == 1)
            gone.cancel()
            await eventually(lambda: made.core.admission.waiting == 0)
            async with made.post({"prompt": PROMPT}) as answer:
                assert answer.status == 503
                assert "Retry-After" in answer.headers
            let_go(one)
            assert await first == 200
            made.assert_nothing_is_counted()

    run(body())


def test_a_full_instance_does_not_keep_requests_for_another_one_waiting() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two", model="other")
        async with world(one, two, queue={"max_in_flight": 1}) as made:
            hold(one)
            asked = {"prompt": PROMPT, "model": one.model, "stream": True}
            waiting = [asyncio.ensure_future(_finish(made, asked)) for _ in range(3)]
            await eventually(lambda: one.running == 1 and made.core.admission.waiting == 2)
            assert (await made.ask(PROMPT, model="other"))[:2] == (200, "two")
            let_go(one)
            assert await asyncio.gather(*waiting) == ["one"] * 3
            made.assert_nothing_is_counted()

    run(body())


def test_the_owner_of_a_prefix_that_is_full_is_not_waited_for() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two, queue={"max_in_flight": 1}) as made:
            one.store(PROMPT)
            await made.knows(one, PROMPT)
            hold(one)
            first = asyncio.ensure_future(_finish(made, {"prompt": PROMPT, "stream": True}))
            await eventually(lambda: one.running == 1)
            assert (await made.ask(PROMPT))[:2] == (200, "two")
            let_go(one)
            assert await first == "one"

    run(body())


async def _finish(made: World, asked: dict[str, object]) -> str:
    async with made.post(asked) as answer:
        await answer.read()
        return answer.headers["X-Opal-Worker"]


def test_a_router_that_ends_lets_what_is_under_way_end_and_takes_nothing_new() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, queue={"max_in_flight": 2}) as made:
            hold(one)
            asked = [streaming(made, number) for number in range(3)]
            await eventually(lambda: one.running == 2 and made.core.admission.waiting == 1)
            ending = asyncio.ensure_future(made.server.drain())
            await eventually(lambda: made.core.admission.is_draining)
            let_go(one)
            assert await ending
            assert sorted(await asyncio.gather(*asked)) == [200, 200, 503]
            made.assert_nothing_is_counted()

    run(body())


def test_a_drain_that_takes_too_long_is_ended() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, limits={"drain_seconds": 0.1}) as made:
            hold(one)
            asked = streaming(made, 0)
            await eventually(lambda: one.running == 1)
            assert not await made.server.drain()
            await made.server.close()
            with pytest.raises(aiohttp.ClientError):
                await asked
            await eventually(lambda: one.ended["cancelled"] == 1)

    run(body())


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    """SIGTERM while a request is under way: it is answered, then the process ends with 0."""

    async def body() -> None:
        one = FakeEngine("one", has_events=False)
        await one.start()
        config = tmp_path / "router.yaml"
        config.write_text(f"port: 0\ninstances: [{{url: '{one.url}'}}]\n")
        command = [sys.executable, "-m", "opal_connector.cli.main", "router", "--config", config]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            url = line.split()[2]
            hold(one)

            def ask() -> bytes:
                data = b'{"prompt": [1, 2, 3], "stream": true}'
                with urllib.request.urlopen(f"{url}/v1/completions", data, timeout=20) as answer:
                    found: bytes = answer.read()
                    return found

            asked = asyncio.ensure_future(asyncio.to_thread(ask))
            await eventually(lambda: one.running == 1)
            process.send_signal(signal.SIGTERM)
            await eventually(lambda: _refuses(url), "the port to be closed")
            let_go(one)
            assert b"[DONE]" in await asked
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
            process.wait()
            await one.close()

    run(body())


def _refuses(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=1)
    except urllib.error.URLError as error:
        return isinstance(error.reason, ConnectionRefusedError)
    return False
