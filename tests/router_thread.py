"""A router in a thread of its own, for clients that block."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import uvloop

from opal_connector.cluster.router.config import router_config
from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.server import RouterServer

PATIENCE_SECONDS = 30.0


class RunningRouter:
    """A router that serves, and a way into its loop.

    Its parts belong to the loop's thread: `look` reads and changes them there.
    """

    def __init__(self, server: RouterServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self.url = server.url

    def look(self, at: Callable[[RouterCore], Any]) -> Any:
        """What a function finds in the router's core."""

        async def asked() -> Any:
            return at(self._server.core)

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result(PATIENCE_SECONDS)

    def until(self, condition: Callable[[RouterCore], Any], what: str = "it") -> None:
        """Wait for something that must become true there."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.look(condition):
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.01)

    def settled(self) -> None:
        """Until the events of all instances are taken in."""
        self.until(
            lambda core: all(one.is_settled for one in core.sources.feed.statuses()), "the events"
        )

    def idle(self) -> None:
        """Until no request is under way, in any book."""
        self.until(
            lambda core: (
                core.forwarder.under_way == len(core.router.loads) == core.admission.waiting == 0
                and not any(instance.in_flight for instance in core.fleet)
            ),
            "the last request's end",
        )


@contextlib.contextmanager
def running_router(
    given: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Iterator[RunningRouter]:
    """A router for the length of a `with` block."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(body: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(body, loop).result(PATIENCE_SECONDS)

    async def make() -> RouterServer:
        return RouterServer(router_config(given), environ or {})

    try:
        server = run(make())
        try:
            run(server.start())
            router = RunningRouter(server, loop)
            router.settled()
            yield router
        finally:
            run(server.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_SECONDS)
        loop.close()
