"""A router in front of fake engines, in the test's own event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp
import uvloop
from fake_engine import BLOCK_TOKENS, FakeEngine

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.config import router_config
from opal_connector.cluster.router.server import RouterServer

PATIENCE_SECONDS = 10.0
# Shorter than anybody would have them, so that tests need not wait.
QUICK: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 0,
    "health": {"interval_seconds": 0.05, "timeout_seconds": 1.0, "dead_after_seconds": 0.5},
    "breaker": {"open_seconds": 0.2},
}


def run(body: Coroutine[Any, Any, None]) -> None:
    """In the loop that a router has, where it is installed."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body, 30))


async def eventually(condition: Callable[[], object], what: str = "it") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


class World:
    """Engines, the router in front of them, and a client."""

    def __init__(
        self, engines: list[FakeEngine], server: RouterServer, client: aiohttp.ClientSession
    ) -> None:
        self.engines = engines
        self.server = server
        self.client = client
        self.core = server.core

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def post(
        self, body: Any, path: str = "/v1/completions", **more: Any
    ) -> "aiohttp.client._RequestContextManager":
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        return self.client.post(self.url + path, **given, **more)

    async def ask(self, token_ids: list[int], **more: Any) -> tuple[int, str | None, Any]:
        """A completion: its status, the worker that gave it, its body."""
        async with self.post({"prompt": token_ids, **more}) as answer:
            return answer.status, answer.headers.get("X-Opal-Worker"), await answer.json()

    async def settled(self) -> None:
        """Until all events were taken in."""
        statuses = self.core.sources.feed.statuses
        await eventually(lambda: all(one.is_settled for one in statuses()), "the events")

    async def knows(self, engine: FakeEngine, token_ids: list[int]) -> None:
        """Until the index has a prompt's whole blocks at an engine."""
        wanted = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS

        def known() -> bool:
            match = self.core.index.match(PrefixRequest(token_ids=token_ids)).get(engine.name)
            return match is not None and match.total_tokens == wanted

        await eventually(known, f"{wanted} tokens at {engine.name}")

    def assert_nothing_is_counted(self) -> None:
        """No request is under way, in any book."""
        core = self.core
        assert core.forwarder.under_way == 0
        assert len(core.router.loads) == 0
        assert core.admission.waiting == 0
        assert [instance.in_flight for instance in core.fleet] == [0] * len(core.fleet)
        assert not any(found._under_way for found in core.router._predictions.values())


@contextlib.asynccontextmanager
async def world(
    *engines: FakeEngine, environ: dict[str, str] | None = None, **changes: Any
) -> AsyncIterator[World]:
    """Start everything, and end it."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.close)
        given = {**QUICK, "instances": [engine.config() for engine in engines], **changes}
        server = RouterServer(router_config(given), environ or {})
        await server.start()
        stack.push_async_callback(server.close)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        made = World(list(engines), server, client)
        await made.settled()
        yield made
