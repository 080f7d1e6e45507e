"""One request at one instance: it is sent, and its answer is handed on as it comes."""

import asyncio
import time
from typing import Final

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from opal_connector.cluster.router.admission import Placement
from opal_connector.cluster.router.bodies import RequestBody
from opal_connector.cluster.router.config import LimitsConfig
from opal_connector.cluster.router.decide import RouteQuestion
from opal_connector.cluster.router.upstream import Headers, UpstreamBroken, UpstreamConnection
from opal_connector.cluster.router.usage import CachedTokens
from opal_connector.cluster.router.wire import (
    EXPECTED_HEADER,
    RANK_HEADER,
    WORKER_HEADER,
    answer_headers,
    origin_form,
    request_head,
)

_EVENT_STREAM: Final = b"text/event-stream"
_FIRST_ERROR: Final = 400


class Job(msgspec.Struct, eq=False):
    """One request of a client, and the names of the instances where it was tried."""

    request: web.BaseRequest
    body: RequestBody
    question: RouteQuestion
    began: float
    deadline: float
    failed: list[str] = []


class _Answer(web.StreamResponse):
    """Sends its headers together with the first bytes of its body."""

    _send_headers_immediately = False


class Exchange:
    """One attempt at a job.

    Mutable state: the connection, once there is one, and how far the answer has come.
    """

    def __init__(
        self, job: Job, placement: Placement, limits: LimitsConfig, *, hides: bool
    ) -> None:
        self._job = job
        self._placement = placement
        self._limits = limits
        self._hides_authorization = hides
        self._pool = placement.instance.pool
        self._connection: UpstreamConnection | None = None
        self._first = b""
        self._cached: CachedTokens | None = None
        self.status = 0
        self.is_computed = False
        self.answer: web.StreamResponse | None = None

    @property
    def cached_tokens(self) -> int | None:
        """What of the prompt was cached, where the answer says so."""
        return self._cached.found() if self._cached is not None else None

    async def open(self) -> None:
        """Send the request and wait for the first bytes of an answer.

        A connection that was kept may have been closed meanwhile: then a fresh one is tried.

        Raises:
            UpstreamBroken: There is no answer.
        """
        try:
            await self._send(is_fresh=False)
        except UpstreamBroken as error:
            connection = self._connection
            if error.kind != "reset" or connection is None or not connection.is_stale:
                raise
            self.close()
            await self._send(is_fresh=True)

    async def pass_on(self) -> web.StreamResponse:
        """Hand the answer on, each part as soon as it is there.

        Raises:
            UpstreamBroken: It breaks off.
        """
        request, connection = self._job.request, self._connection
        assert connection is not None
        answer = _Answer(
            status=connection.status,
            reason=connection.reason,
            headers=self._answer_headers(connection.headers),
        )
        is_stream = any(value.startswith(_EVENT_STREAM) for _, value in connection.headers)
        cached = self._cached = CachedTokens(is_stream=is_stream)
        if not connection.has_ended:
            connection.end_at(self._loop_time(self._job.deadline), "timeout", "it takes too long")
            connection.on_failure = self._expire
        self.answer = answer
        chunk, self._first = self._first, b""
        try:
            await answer.prepare(request)
            while chunk:
                cached.see(chunk)
                await answer.write(chunk)
                chunk = await connection.chunk()
            await answer.write_eof()
        except ConnectionResetError:
            pass  # the client is gone
        return answer

    def cut(self) -> web.StreamResponse:
        """End the client's connection where the answer broke off, as the engine's own would."""
        assert self.answer is not None
        transport = self._job.request.transport
        if transport is not None:
            transport.close()
        return self.answer

    def close(self) -> None:
        """Let the connection go; whatever is still under way there is broken off."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give(connection)

    # ---- inside ----

    async def _send(self, *, is_fresh: bool) -> None:
        body = self._job.body.raw
        connection = self._connection = await self._pool.take(is_fresh=is_fresh)
        first_byte_at = time.monotonic() + self._limits.first_byte_timeout_seconds
        connection.end_at(
            self._loop_time(min(first_byte_at, self._job.deadline)), "timeout", "no answer in time"
        )
        connection.send(self._request_head(len(body)), body)
        await connection.head()
        self.status = connection.status
        self._first = await connection.chunk()
        self.is_computed = self.status < _FIRST_ERROR

    def _request_head(self, length: int) -> bytes:
        instance = self._placement.instance
        address = instance.pool.address
        lines = request_head(
            address.prefix + origin_form(self._job.request.raw_path),
            address.host_header,
            self._job.request.raw_headers,
            length,
            hides_authorization=self._hides_authorization or instance.api_key is not None,
        )
        if instance.api_key is not None:
            lines.append(b"Authorization: Bearer %b\r\n" % instance.api_key.encode())
        rank = instance.rank_of(self._placement.decision.worker_id)
        if rank is not None:
            lines.append(b"%b: %d\r\n" % (RANK_HEADER.encode(), rank))
        lines.append(b"\r\n")
        return b"".join(lines)

    def _answer_headers(self, headers: Headers) -> CIMultiDict[str]:
        found = CIMultiDict(
            (_decoded(name), _decoded(value)) for name, value in answer_headers(headers)
        )
        decision = self._placement.decision
        found[WORKER_HEADER] = decision.worker_id
        if self._job.question.prefix is not None:
            found[EXPECTED_HEADER] = str(decision.expected_tokens)
        return found

    def _expire(self, error: UpstreamBroken) -> None:
        """It takes too long: a client that does not read is not waited for either."""
        transport = self._job.request.transport
        if error.kind == "timeout" and transport is not None:
            transport.abort()

    @staticmethod
    def _loop_time(monotonic: float) -> float:
        return asyncio.get_running_loop().time() + monotonic - time.monotonic()


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
