"""The driver against an engine without a model: who is asked what, when, and what is counted."""

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from fake_engine import FakeEngine
from router_world import eventually, run, world

from opal_connector.cli.bench import (
    Conversation,
    RequestRecord,
    Sessions,
    Turn,
    Vocabulary,
    Workload,
)
from opal_connector.cli.bench.client import CHAT, COMPLETIONS, Target
from opal_connector.cli.bench.driver import run as bench
from opal_connector.cli.bench.summary import summarize


def bodies(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(raw) for _, _, raw in engine.seen]


class Given(Workload, frozen=True, kw_only=True):
    """Conversations that a test wrote down."""

    kind = "given"
    given: list[Conversation]
    at_once: int | None = None
    sessions_at_once: int | None = None

    @property
    def requests_at_once(self) -> int | None:
        return self.at_once

    @property
    def conversations_at_once(self) -> int | None:
        return self.sessions_at_once

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        return iter(self.given)


def ids(number: int, count: int = 40) -> list[int]:
    return Vocabulary().tokens(count, number)


def singles(count: int, **more: Any) -> list[Conversation]:
    return [
        Conversation(f"c{number}", [Turn(output_tokens=3, token_ids=ids(number), **more)])
        for number in range(count)
    ]


def test_turn_holds_the_real_answers_before_it_and_starts_after_them() -> None:
    """Turn i+1 is what a chat client would send: everything said, the engine's words included."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False, token_seconds=0.002).start()
        try:
            workload = Sessions(num_users=3, turns_per_user=4, system_prompt_size=50)
            result = await bench(workload, Target(url=engine.url))
        finally:
            await engine.close()

        assert len(result.successes) == len(result.requests) == 12
        assert {path for path, _, _ in engine.seen} == {CHAT}
        by_length: dict[int, list[Any]] = {}
        for one in bodies(engine):
            by_length.setdefault(len(one["messages"]), []).append(one["messages"])
        assert sorted(by_length) == [2, 4, 6, 8]
        systems = {messages[0]["content"] for found in by_length.values() for messages in found}
        assert len(systems) == 1
        for longest in by_length[8]:
            answers = [one["content"] for one in longest if one["role"] == "assistant"]
            assert answers == ["".join(f"t{number}" for number in range(64))] * 3
            assert longest[:6] in by_length[6]
        for user in range(3):
            own = [one for one in result.requests if one.conversation_id == f"user-{user}"]
            for sooner, later in pairwise(own):
                assert later.turn == sooner.turn + 1
                assert later.sent_seconds >= sooner.end_seconds

    run(body())


def test_record_has_what_the_engine_counted_and_when_tokens_came() -> None:
    """Times and tokens of a request are the engine's own, and the second time its cache's."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False, token_seconds=0.02).start()
        try:
            turn = Turn(output_tokens=5, token_ids=ids(1, 65))
            given = [Conversation("a", [turn]), Conversation("b", [turn])]
            result = await bench(Given(given=given, at_once=1), Target(url=engine.url))
        finally:
            await engine.close()

        cold, warm = result.requests
        assert (cold.prompt_tokens, cold.cached_tokens) == (65, 0)
        assert (warm.prompt_tokens, warm.cached_tokens) == (65, 64)
        assert cold.output_tokens == 5
        assert cold.output_text == "t0t1t2t3t4"
        assert len(cold.token_seconds) == 5
        assert cold.tpot_seconds is not None
        assert cold.tpot_seconds >= 0.02
        assert cold.latency_seconds >= 0.1
        [first, _] = bodies(engine)
        assert first["prompt"] == ids(1, 65)
        assert first["stream_options"] == {"include_usage": True}
        assert result.endpoint == COMPLETIONS

    run(body())


def test_no_more_requests_are_under_way_than_allowed() -> None:
    """The limit holds for requests, and is used."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False, token_seconds=0.005).start()
        try:
            most = 0
            result = await bench(Given(given=singles(12), at_once=3), Target(url=engine.url))
        finally:
            await engine.close()

        marks = [(one.sent_seconds, 1) for one in result.requests]
        marks += [(one.end_seconds, -1) for one in result.requests]
        under_way = 0
        for _, change in sorted(marks):
            under_way += change
            most = max(most, under_way)
        assert most == 3

    run(body())


def test_conversations_wait_for_a_place_and_keep_it() -> None:
    """With one place, a conversation is over before the next begins, its pauses included."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        try:
            given = [
                Conversation(
                    f"c{number}",
                    [
                        Turn(output_tokens=2, token_ids=ids(number)),
                        Turn(output_tokens=2, token_ids=ids(number, 60), delay_seconds=0.03),
                    ],
                    turn_count=2,
                )
                for number in range(3)
            ]
            result = await bench(Given(given=given, sessions_at_once=1), Target(url=engine.url))
        finally:
            await engine.close()

        assert [(one.conversation_id, one.turn) for one in result.requests] == [
            (f"c{number}", turn) for number in range(3) for turn in range(2)
        ]
        for first, second in zip(result.requests[::2], result.requests[1::2], strict=True):
            assert second.sent_seconds - first.end_seconds >= 0.03

    run(body())


def test_conversation_begins_at_its_time() -> None:
    """Arrivals are those of the workload, not those of the answers."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False, token_seconds=0.1).start()
        try:
            given = [
                Conversation(
                    f"c{number}",
                    [Turn(output_tokens=2, token_ids=ids(number))],
                    start_seconds=0.02 * number,
                )
                for number in range(5)
            ]
            result = await bench(Given(given=given), Target(url=engine.url))
        finally:
            await engine.close()

        sent = sorted(one.sent_seconds for one in result.requests)
        for number, seconds in enumerate(sent):
            assert seconds >= 0.02 * number
        # Not after the answers, of which each takes 0.2 s.
        assert max(sent) < 5 * 0.1

    run(body())


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (503, "http_503"),
        ("reset", "connection_broken"),
        ("reset_mid_stream", "connection_broken"),
        ("garbage", "connection_broken"),
        ("hang", "timeout"),
    ],
)
def test_failure_is_counted_by_its_kind(fault: Any, kind: str) -> None:
    """A request that was not answered whole is no success, and says what it was instead."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        engine.fault = fault
        try:
            target = Target(url=engine.url, timeout_seconds=0.3)
            result = await bench(Given(given=singles(2), at_once=1), target)
        finally:
            await engine.close()

        assert [one.error for one in result.requests] == [kind, kind]
        assert result.successes == []
        assert all(one.error_detail for one in result.requests)

    run(body())


def test_failed_turn_ends_its_conversation_and_the_rest_is_counted() -> None:
    """What could not be asked any more is neither a failure nor forgotten."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        engine.fault, engine.fault_count = 500, 1
        try:
            workload = Sessions(num_users=2, turns_per_user=3, max_concurrent_sessions=1)
            result = await bench(workload, Target(url=engine.url))
        finally:
            await engine.close()

        assert [one.error for one in result.requests] == ["http_500", "", "", ""]
        assert result.not_sent == 2

    run(body())


def test_nobody_listens() -> None:
    """A server that is not there is a failure of every request, not of the benchmark."""

    async def body() -> None:
        target = Target(url="http://127.0.0.1:9", model="any")
        result = await bench(Given(given=singles(2)), target)

        assert [one.error for one in result.requests] == ["no_connection"] * 2

    run(body())


def test_stop_keeps_what_was_measured() -> None:
    """A run that is cut short is a result of what was over, and says what was not."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False, token_seconds=0.01).start()
        stop = asyncio.Event()
        seen: list[RequestRecord] = []

        def on_record(record: RequestRecord) -> None:
            seen.append(record)
            if len(seen) == 4:
                stop.set()

        try:
            workload = Given(given=singles(100), at_once=2)
            result = await bench(workload, Target(url=engine.url), on_record=on_record, stop=stop)
        finally:
            await engine.close()

        assert result.is_stopped
        assert result.requests == seen
        assert 4 <= len(seen) <= 6
        assert 1 <= result.cut_off <= 2
        assert "Stopped early" in summarize(result).notes[0]

    run(body())


def test_cancelled_run_leaves_nothing_behind() -> None:
    """Who imports the driver may give up on it: requests end, and the cancellation is heard."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        engine.fault = "hang"
        try:
            work = asyncio.ensure_future(
                bench(Given(given=singles(3)), Target(url=engine.url, model="any"))
            )
            await eventually(lambda: engine.running == 3, "requests under way")
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            await eventually(lambda: engine.running == 0, "their end")
        finally:
            await engine.close()

    run(body())


def test_worker_of_the_router_is_known() -> None:
    """Behind a router every record says which instance it was."""

    async def body() -> None:
        async with world(FakeEngine("one"), FakeEngine("two"), policy="RoundRobin") as there:
            workload = Given(given=singles(4), at_once=1)
            result = await bench(workload, Target(url=f"{there.url}/v1"))

        assert [one.worker for one in result.requests] == ["one", "two", "one", "two"]
        assert result.model == "fake-model"

    run(body())


@pytest.mark.parametrize("says_cached", [True, False])
def test_instances_behind_the_router_say_which_tier(says_cached: bool) -> None:
    """Nobody has to name them: the router lists them, and their counters are summed."""

    async def body() -> None:
        engines = [FakeEngine(name, says_cached=says_cached) for name in ("one", "two")]
        async with world(*engines, policy="RoundRobin") as there:
            turn = Turn(output_tokens=2, token_ids=ids(1, 65))
            given = [Conversation(f"c{number}", [turn]) for number in range(6)]
            result = await bench(Given(given=given, at_once=1), Target(url=there.url))

        assert result.tier_tokens == {"apc": 4 * 64, "Cache Miss": 2 * 65 + 4}
        assert len(result.notes) == (0 if says_cached else 1)

    run(body())


def test_instances_that_are_named_are_read_without_the_endpoints_key() -> None:
    """What opens the endpoint is sent nowhere else, and a metrics address may be a server's."""
    heard: list[dict[str, str]] = []

    async def metrics(request: web.BaseRequest) -> web.StreamResponse:
        heard.append(dict(request.headers))
        return web.Response(text='vllm:opal_hit_tokens_total{tier="CPUMemory"} 0\n')

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        runner = web.ServerRunner(web.Server(metrics))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            target = Target(
                url=engine.url,
                headers={"Authorization": "Bearer k"},
                metrics_urls=(f"http://127.0.0.1:{runner.addresses[0][1]}",),
            )
            result = await bench(Given(given=singles(2), at_once=1), target)
        finally:
            await runner.cleanup()
            await engine.close()

        assert list(result.tier_tokens or ()) == ["apc", "CPUMemory", "Cache Miss"]
        assert len(heard) == 2
        assert not any("Authorization" in headers for headers in heard)

    run(body())


def test_chat_endpoint_gets_texts_that_share_what_the_tokens_share() -> None:
    """Token prompts become words where only messages are understood."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        try:
            shared = ids(1, 30)
            given = [
                Conversation("a", [Turn(output_tokens=2, token_ids=[*shared, *ids(2, 10)])]),
                Conversation("b", [Turn(output_tokens=2, token_ids=[*shared, *ids(3, 10)])]),
            ]
            await bench(Given(given=given, at_once=1), Target(url=engine.url, endpoint=CHAT))
        finally:
            await engine.close()

        one, two = (found["messages"][0]["content"].split() for found in bodies(engine))
        assert one[:30] == two[:30]
        assert len(one) == len(two) == 40
        assert one[30:] != two[30:]

    run(body())


def test_session_can_be_named_in_a_header() -> None:
    """A router that keeps sessions together can be told them."""

    async def body() -> None:
        engine = await FakeEngine(has_events=False).start()
        try:
            target = Target(
                url=engine.url, session_header="X-Session-ID", headers={"Authorization": "Bearer k"}
            )
            started = time.perf_counter()
            result = await bench(Sessions(num_users=2, turns_per_user=2), target)
            assert time.perf_counter() - started >= result.duration_seconds
        finally:
            await engine.close()

        headers = [{name.lower(): value for name, value in found} for _, found, _ in engine.seen]
        assert {one[b"x-session-id"] for one in headers} == {b"user-0", b"user-1"}
        assert {one[b"authorization"] for one in headers} == {b"Bearer k"}

    run(body())
