"""HTTP among the processes of one router: one speaks for all, or the figures of all become one."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from opal_connector.cluster.router.wire import SESSION_HEADER, error_answer

logger = logging.getLogger(__name__)

FIRST: Final = 0  # the process that administrators speak to, whichever they reach
_HOST: Final = "http://sibling"
_ANSWER_SECONDS: Final = 5.0
_ASKED_HEADERS: Final = frozenset({"content-type", "accept", SESSION_HEADER.lower()})
_OWN_HEADERS: Final = frozenset({"connection", "content-length", "date", "keep-alive", "server"})
_ADMIN_SECONDS: Final = 600.0  # to drain an instance takes long


class Share(msgspec.Struct, frozen=True):
    """That a router is one of several processes: which one, and where they meet."""

    directory: Path
    number: int
    count: int


class Siblings:
    """The other processes of this router, asked by HTTP over sockets in a private directory.

    Mutable state: the sessions with them, which the loop's thread alone uses.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @property
    def is_first(self) -> bool:
        """Whether this is the process that administrators speak to."""
        return self._share.number == FIRST

    def site(self, runner: web.ServerRunner) -> web.UnixSite:
        """Where the others ask this one."""
        path = self._path(self._share.number)
        path.unlink(missing_ok=True)  # of a process that was here before
        return web.UnixSite(runner, str(path))

    async def close(self) -> None:
        """End the sessions."""
        for session in self._sessions.values():
            await session.close()

    async def pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        """The first process's answer."""
        body = await request.read()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower().startswith("x-opal-") or name.lower() in _ASKED_HEADERS
        }
        try:
            async with self._session(FIRST).request(
                request.method,
                _HOST + request.path_qs,
                data=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=_ADMIN_SECONDS),
            ) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    headers={
                        name: value
                        for name, value in answer.headers.items()
                        if name.lower() not in _OWN_HEADERS
                    },
                )
        except (aiohttp.ClientError, TimeoutError, OSError):
            again = {"Retry-After": "1"}
            return error_answer(503, "the router's first process does not answer", headers=again)

    async def metrics(self, own: bytes) -> bytes:
        """The figures of all processes that answer, each with its number as a label."""
        others = [number for number in range(self._share.count) if number != self._share.number]
        found = await asyncio.gather(*(self._metrics_of(number) for number in others))
        told = dict(zip(others, found, strict=True)) | {self._share.number: own}
        return merged({number: text for number, text in sorted(told.items()) if text is not None})

    # ---- inside ----

    def _path(self, number: int) -> Path:
        return self._share.directory / f"http-{number}.sock"

    def _session(self, number: int) -> aiohttp.ClientSession:
        session = self._sessions.get(number)
        if session is None:
            connector = aiohttp.UnixConnector(path=str(self._path(number)))
            session = self._sessions[number] = aiohttp.ClientSession(connector=connector)
        return session

    async def _metrics_of(self, number: int) -> bytes | None:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session(number).get(f"{_HOST}/metrics", timeout=timeout) as answer:
                return await answer.read()
        return None


def is_sibling(request: web.BaseRequest) -> bool:
    """Whether another process of this router asks: nobody else reaches that socket."""
    transport = request.transport
    opened = transport.get_extra_info("socket") if transport is not None else None
    return opened is not None and opened.family == socket.AF_UNIX


class _Merged:
    """Figures of several processes; it keeps nothing but their texts."""

    def __init__(self, expositions: Mapping[int, bytes]) -> None:
        self._expositions = expositions

    def collect(self) -> Iterator[Metric]:
        """Every family once, with every process's samples."""
        families: dict[str, Metric] = {}
        for number, text in self._expositions.items():
            for family in text_string_to_metric_families(text.decode()):
                known = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                known.samples.extend(
                    sample._replace(labels={**sample.labels, "process": str(number)})
                    for sample in family.samples
                )
        yield from families.values()


def merged(expositions: Mapping[int, bytes]) -> bytes:
    """The figures of several processes as one text, with a label `process`."""
    registry = CollectorRegistry()
    registry.register(_Merged(expositions))
    text: bytes = generate_latest(registry)
    return text
