"""What an administrator wants counts in all processes of a router, also when one comes again."""

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from opal_connector.cluster.router.config import router_config
from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.peer_messages import Hello, Message, Standing, encode_frame
from opal_connector.cluster.router.process_books import ProcessBooks
from opal_connector.cluster.router.processes import Processes
from opal_connector.cluster.router.shared_router import SharedRouter
from opal_connector.cluster.router.siblings import Share, Siblings
from opal_connector.cluster.router.wire import json_answer

PATIENCE_SECONDS = 30.0
GUARDED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def core() -> RouterCore:
    return RouterCore(router_config({}), {}, router_type=SharedRouter)


def test_a_change_is_newer_than_the_one_before_it_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that is set back must not have the other processes ignore an administrator."""

    async def body() -> None:
        one, other = core(), core()
        assert isinstance(one.router, SharedRouter)
        assert isinstance(other.router, SharedRouter)
        books, others = ProcessBooks(one, one.router), ProcessBooks(other, other.router)
        told: list[Message] = []
        books.tell = told.append
        for clock, policy in ((1_000.0, "RoundRobin"), (900.0, "LeastLoaded")):
            monkeypatch.setattr(time, "time", lambda clock=clock: clock)
            one.router.set_policy(policy)
            one.on_admin()
        for message in told:
            others.hear(0, message)
        await others.settle()
        assert other.router.policy_name == "LeastLoaded"

    asyncio.run(body())


def test_nobody_can_ask_a_process_before_it_knows_what_an_administrator_wanted(
    tmp_path: Path,
) -> None:
    """What is changed of a state that is out of date would become that of all processes."""

    async def answer(_request: web.BaseRequest) -> web.StreamResponse:
        return json_answer({})

    async def told_late(core: RouterCore) -> None:
        asked_at = tmp_path / "http-0.sock"
        while not (tmp_path / "peer-0.sock").exists():
            await asyncio.sleep(0.01)
        _, writer = await asyncio.open_unix_connection(tmp_path / "peer-0.sock")
        assert not asked_at.exists()
        wanted = Standing(time.time(), "RoundRobin", (), ())
        writer.write(encode_frame(Hello(1)) + encode_frame(wanted))
        while not asked_at.exists():
            await asyncio.sleep(0.01)
        assert core.router.policy_name == "RoundRobin"
        writer.close()

    async def body() -> None:
        first = core()
        # Another process that is there, and that takes its time to tell.
        server = await asyncio.start_unix_server(lambda *_: None, tmp_path / "peer-1.sock")
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        processes = Processes(Share(tmp_path, 0, 2), first)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await asyncio.gather(processes.start(runner), told_late(first))
        finally:
            await processes.close()
            await runner.cleanup()
            server.close()
            await first.close()

    asyncio.run(body())


def test_question_and_answer_are_whole_whichever_process_is_asked(tmp_path: Path) -> None:
    """The session that a route is asked for, and what forbids a browser to keep an answer."""
    first, second = (Siblings(Share(tmp_path, number, 2)) for number in range(2))

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return json_answer(request.headers["X-Session-ID"], status=409, headers=GUARDED)

    async def body() -> None:
        runners = [web.ServerRunner(web.Server(one)) for one in (answer, second.pass_on)]
        for runner in runners:
            await runner.setup()
        await first.site(runners[0]).start()
        await web.TCPSite(runners[1], "127.0.0.1", 0).start()
        port = runners[1].addresses[0][1]
        async with (
            aiohttp.ClientSession() as client,
            client.get(f"http://127.0.0.1:{port}/route", headers={"X-Session-ID": "s"}) as found,
        ):
            assert (found.status, await found.json()) == (409, "s")
            assert found.headers.items() >= GUARDED.items()
            assert len(found.headers.getall("Content-Length")) == 1
        await second.close()
        for runner in runners:
            await runner.cleanup()

    asyncio.run(body())
