"""The instances behind an endpoint, and what their /metrics count. Needs aiohttp."""

import asyncio
import time
from typing import Final

import aiohttp

from opal_connector.cli.bench.client import Target, fetch_json
from opal_connector.cli.bench.tiers import CacheCounters
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.prometheus import Sample, parse_prometheus

_ASK_SECONDS_MAX: Final = 10.0
_SETTLE_SECONDS_MAX: Final = 3.0
_POLL_SECONDS: Final = 0.1
_ROUTER_PREFIX: Final = "opal_router_"
_ENGINE_PREFIX: Final = "vllm:"


class Instances:
    """Whose counters are read, and what they were at the start.

    Mutable state: the counters and the notes; one task uses it.
    """

    def __init__(self, target: Target, session: aiohttp.ClientSession) -> None:
        self.notes: list[str] = []
        self._target = target
        self._session = session
        self._urls: tuple[str, ...] = ()
        self._before: list[CacheCounters] | None = None

    async def begin(self) -> None:
        """Finds the instances and reads what they have counted so far."""
        wanted = self._target.metrics_urls
        self._urls = tuple(map(_metrics_url, wanted)) if wanted else await self._find()
        if self._urls:
            self._before = await self._read()

    async def end(self) -> CacheCounters | None:
        """What all of them counted since the start, None if that is not known."""
        if self._before is None:
            return None
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        while True:
            after = await self._read()
            if after is None:
                return None
            counted = CacheCounters()
            for sooner, later in zip(self._before, after, strict=True):
                counted = counted.plus(later.since(sooner))
            if counted.is_settled or time.monotonic() > deadline:
                return counted
            await asyncio.sleep(_POLL_SECONDS)

    async def _find(self) -> tuple[str, ...]:
        """The endpoint itself, if it is an engine, or all behind it, if it is Opal's router."""
        base = self._target.base
        samples = await self._samples(f"{base}/metrics")
        if samples is None:
            self._say(f"{base}/metrics cannot be read")
            return ()
        names = {sample.name for sample in samples}
        if any(name.startswith(_ENGINE_PREFIX) for name in names):
            return (f"{base}/metrics",)
        if not any(name.startswith(_ROUTER_PREFIX) for name in names):
            self._say(f"{base}/metrics is neither vLLM's nor Opal's router's")
            return ()
        try:
            listing = await fetch_json(
                self._session, f"{base}/admin/instances", self._target.headers
            )
            return tuple(_metrics_url(str(one["url"])) for one in listing["instances"])
        except (CommandFailure, KeyError, TypeError):
            self._say("the router does not list its instances here")
            return ()

    async def _read(self) -> list[CacheCounters] | None:
        counters = []
        for url in self._urls:
            samples = await self._samples(url)
            if samples is None:
                self._say(f"{url} cannot be read")
                return None
            counters.append(CacheCounters.read(samples))
        return counters

    async def _samples(self, url: str) -> list[Sample] | None:
        # What is meant for the endpoint, keys among it, is nobody else's.
        own = url.startswith(self._target.base + "/")
        headers = self._target.headers if own else {}
        try:
            async with (
                asyncio.timeout(_ASK_SECONDS_MAX),
                self._session.get(url, headers=headers) as answer,
            ):
                text = await answer.text(errors="replace")
                return parse_prometheus(text) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def _say(self, why: str) -> None:
        self.notes.append(f"Tokens are not split by tier: {why}; --metrics names the instances.")


def _metrics_url(url: str) -> str:
    """The address of /metrics; people name the server."""
    bare = url.rstrip("/")
    return bare if bare.endswith("/metrics") else f"{bare}/metrics"
