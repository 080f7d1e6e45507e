"""What happens to requests when instances, clients or the way between them fail."""

import asyncio
import json
import logging
import time

import aiohttp
import pytest
from fake_channel import DISK
from fake_engine import FakeEngine
from router_world import World, eventually, run, world

from opal_connector.cluster.router.breaker import BreakerState
from opal_connector.cluster.router.instances import Health

PROMPT = list(range(320))
ONLY_REQUESTS = {"health": {"interval_seconds": 3_600.0}}  # nothing but requests tells


def state(made: World, name: str) -> Health:
    instance = made.core.fleet.get(name)
    assert instance is not None
    return instance.health


async def prefer(made: World, engine: FakeEngine) -> None:
    """Requests for the prompt go there, as long as they may."""
    engine.store(PROMPT)
    await made.knows(engine, PROMPT)


@pytest.mark.parametrize("fault", ["reset", "garbage", 429, 502, 503, 504])
def test_what_fails_before_its_first_byte_is_answered_by_another_instance(
    fault: str | int,
) -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await prefer(made, one)
            one.fault = fault
            status, worker, answer = await made.ask(PROMPT)
            assert (status, worker) == (200, "two")
            assert answer["choices"]
            # A kept connection that breaks may have been closed before: that is tried twice.
            tried = sum(path == "/v1/completions" for path, _, _ in one.seen)
            assert tried <= 1 + (fault == "reset")
            made.assert_nothing_is_counted()

    run(body())


def test_an_instance_that_refuses_connections_costs_a_client_nothing() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two, **ONLY_REQUESTS) as made:
            await prefer(made, one)
            await one.stop_listening()
            answers = [await made.ask(PROMPT, user=str(number)) for number in range(8)]
            assert {(status, worker) for status, worker, _ in answers} == {(200, "two")}
            made.assert_nothing_is_counted()

    run(body())


@pytest.mark.parametrize(("fault", "status"), [(500, 500), (503, 503), (429, 429), ("reset", 502)])
def test_where_nobody_else_can_answer_the_failure_is_the_clients(
    fault: str | int, status: int
) -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            one.fault = fault
            async with made.post({"prompt": PROMPT}) as answer:
                assert answer.status == status
                assert "error" in await answer.json()
                if fault == "reset":
                    assert answer.headers["Retry-After"] == "1"
            tried = sum(path == "/v1/completions" for path, _, _ in one.seen)
            assert tried <= 1 + (fault == "reset")
            made.assert_nothing_is_counted()

    run(body())


def test_an_error_of_the_engine_itself_is_not_tried_again() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await prefer(made, one)
            one.fault = 500
            assert (await made.ask(PROMPT))[:2] == (500, "one")
            assert not two.seen

    run(body())


def test_attempts_are_bounded_however_many_instances_there_are() -> None:
    async def body() -> None:
        engines = [FakeEngine(str(number)) for number in range(5)]
        async with world(*engines, limits={"max_attempts": 3}) as made:
            for engine in engines:
                engine.fault = 503
            assert (await made.ask(PROMPT))[0] == 503
            assert sum(len(engine.seen) for engine in engines) == 3
            made.assert_nothing_is_counted()

    run(body())


@pytest.mark.parametrize("dies", [False, True])
def test_an_answer_that_breaks_off_breaks_off_for_the_client_and_is_not_repeated(
    dies: bool,
) -> None:
    """The client sees what it would see of the engine itself: what came, and no end."""

    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await prefer(made, one)
            asked = {"prompt": PROMPT, "stream": True, "max_tokens": 5}
            if dies:
                one.step = asyncio.Semaphore(2)
            else:
                one.fault = "reset_mid_stream"
            async with made.post(asked) as answer:
                assert (answer.status, answer.headers["X-Opal-Worker"]) == (200, "one")
                got = bytearray()
                if dies:
                    while b'"t1"' not in got:
                        got += await answer.content.readany()
                    await one.stop_listening()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await _read_into(got, answer)
            assert b'"t1"' in got
            assert b"[DONE]" not in got
            assert not two.seen
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()
            assert (
                sum(
                    count
                    for (event, _), count in made.core.forwarder.counts.items()
                    if event == "truncated"
                )
                == 1
            )

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_the_request_at_the_engine(stream: bool) -> None:
    async def body() -> None:
        one = FakeEngine("one", token_seconds=0.01)
        async with world(one) as made:
            asked = {"prompt": PROMPT, "stream": stream, "max_tokens": 100_000}
            request = asyncio.ensure_future(_read(made, asked))
            await eventually(lambda: one.running == 1)
            request.cancel()
            await eventually(lambda: one.ended["cancelled"] == 1, "the engine to be told")
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()
            assert made.core.fleet.get("one").breaker.state(0.0) is BreakerState.CLOSED  # type: ignore[union-attr]

    run(body())


async def _read_into(got: bytearray, answer: aiohttp.ClientResponse) -> None:
    while data := await answer.content.readany():
        got += data


async def _read(made: World, asked: object) -> bytes:
    async with made.post(asked) as answer:
        return await answer.read()


def test_a_hanging_engine_costs_as_long_as_a_first_byte_may_take() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two, limits={"first_byte_timeout_seconds": 0.1}) as made:
            await prefer(made, one)
            one.fault = "hang"
            assert (await made.ask(PROMPT))[0] == 504
            await eventually(lambda: one.ended["cancelled"] == 1)
            assert not two.seen  # it may only be busy: twice the work would not help
            made.assert_nothing_is_counted()

    run(body())


def test_a_request_ends_at_its_deadline_even_in_the_middle() -> None:
    async def body() -> None:
        one = FakeEngine("one", token_seconds=0.01)
        async with world(one, limits={"request_timeout_seconds": 0.3}) as made:
            with pytest.raises(aiohttp.ClientPayloadError):
                await _read(made, {"prompt": PROMPT, "stream": True, "max_tokens": 100_000})
            await eventually(lambda: one.ended["cancelled"] == 1)
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()

    run(body())


def test_slow_bytes_arrive_all_and_disturb_nobody() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one) as made:
            asked = {"prompt": PROMPT, "stream": True}
            await made.ask(PROMPT)
            expected = await _read(made, asked)
            one.fault, one.fault_count = "slow", 1
            slow = asyncio.ensure_future(_read(made, asked))
            await eventually(lambda: one.running == 1)
            for number in range(5):
                assert (await made.ask([number] * 50))[0] == 200
            assert await slow == expected

    run(body())


def test_a_client_that_does_not_read_keeps_the_engine_waiting_and_nothing_else() -> None:
    """What the router keeps for it is bounded: the engine is slowed down to the client's speed."""

    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, limits={"request_timeout_seconds": 2.0}) as made:
            made_tokens = 400_000  # far more than all buffers together
            asked = {"prompt": PROMPT, "stream": True, "max_tokens": made_tokens}
            payload = json.dumps(asked).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", made.server.port, limit=1_024)
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
            head += f"Content-Length: {len(payload)}\r\n\r\n"
            writer.write(head.encode() + payload)
            await eventually(lambda: one.running == 1)
            for number in range(5):
                assert (await made.ask([number] * 50))[0] == 200
            await eventually(lambda: one.ended["cancelled"] == 1, "its deadline")
            await eventually(lambda: made.core.forwarder.under_way == 0)
            made.assert_nothing_is_counted()
            writer.close()

    run(body())


def test_with_all_instances_down_a_client_is_told_when_to_come_back() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await one.stop_listening()
            await two.stop_listening()
            for path in ("/v1/completions", "/v1/chat/completions"):
                async with made.post({"prompt": PROMPT}, path) as answer:
                    assert answer.status == 503
                    assert int(answer.headers["Retry-After"]) >= 1
            await eventually(lambda: state(made, "one") is state(made, "two") is Health.DEAD)
            async with made.client.get(made.url + "/ready") as answer:
                assert answer.status == 503
            async with made.client.get(made.url + "/health") as answer:
                assert answer.status == 200
            assert (await made.ask(PROMPT))[0] == 503
            made.assert_nothing_is_counted()
            await two.listen()
            await eventually(lambda: state(made, "two") is Health.UP, "its return")
            assert (await made.ask(PROMPT))[:2] == (200, "two")

    run(body())


def test_a_dead_instances_memory_is_forgotten_at_once_and_its_disk_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await prefer(made, one)
            other = list(range(5_000, 5_320))
            one.store_below(other)
            counts = made.core.index.workers["one"].places
            await eventually(lambda: (0, DISK) in counts and counts[0, DISK].block_count == 20)
            await one.stop_listening()
            await eventually(lambda: state(made, "one") is Health.DEAD, "its death")
            assert made.core.index.workers["one"].block_counts == {(0, DISK): 20}
            assert made.core.deaths == 1
            assert made.core.forgotten_blocks == 20
            await one.restart()
            await eventually(lambda: state(made, "one") is Health.UP, "its return")
            await eventually(lambda: made.core.index.workers["one"].description.incarnation)
            assert (await made.ask(other))[1] == "one"

    with caplog.at_level(logging.WARNING):
        run(body())
    assert any("one is dead: 20 blocks" in record.getMessage() for record in caplog.records)


def test_what_waits_for_an_instance_that_dies_goes_elsewhere() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        async with world(one, two) as made:
            await prefer(made, one)
            one.fault = "hang"
            waiting = [asyncio.ensure_future(made.ask(PROMPT)) for _ in range(3)]
            await eventually(lambda: one.running > 0)
            one.health_status = 500
            answers = await asyncio.gather(*waiting)
            assert {(status, worker) for status, worker, _ in answers} == {(200, "two")}
            await eventually(lambda: one.running == 0)
            made.assert_nothing_is_counted()

    run(body())


def test_a_breaker_opens_after_failures_and_closes_after_one_success() -> None:
    async def body() -> None:
        one, two = FakeEngine("one"), FakeEngine("two")
        breaker = {"failures": 3, "open_seconds": 0.3}
        async with world(one, two, breaker=breaker, affinity={"mode": "off"}) as made:
            instance = made.core.fleet.get("one")
            assert instance is not None
            await prefer(made, one)
            one.fault = 503
            for _ in range(6):
                assert (await made.ask(PROMPT))[:2] == (200, "two")
            tried = sum(path == "/v1/completions" for path, _, _ in one.seen)
            assert tried <= 3
            one.fault = None
            two.fault = 503
            await eventually(lambda: instance.is_well(time.monotonic()), "the trial")
            assert (await made.ask(PROMPT))[:2] == (200, "one")
            assert instance.breaker.state(time.monotonic()) is BreakerState.CLOSED

    run(body())


def test_a_kept_connection_that_the_engine_closed_is_no_failure() -> None:
    async def body() -> None:
        one = FakeEngine("one")
        async with world(one, **ONLY_REQUESTS) as made:
            for _ in range(3):
                assert (await made.ask(PROMPT))[0] == 200
                assert one._runner is not None
                assert one._runner.server is not None
                for connection in one._runner.server.connections:
                    assert connection.transport is not None
                    connection.transport.abort()
            assert not made.core.forwarder.counts["broken", "reset"]

    run(body())
