"""HTTP/1.1 to an instance: connections that are kept, answers that are handed on as they come."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools
import msgspec

Headers = list[tuple[bytes, bytes]]

IDLE_SECONDS: Final = 4.0  # below the five after which an engine's server closes
_HIGH_WATER_BYTES: Final = 256 << 10
_MAX_HEAD_BYTES: Final = 64 << 10
_BODILESS: Final = frozenset({204, 304})


class UpstreamBroken(Exception):
    """An instance did not answer as it should; `kind` is a word for metrics, the text says what."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Address(msgspec.Struct, frozen=True):
    """Where an instance listens; `prefix` goes before every path."""

    host: str
    port: int
    is_tls: bool = False
    prefix: str = ""

    @property
    def host_header(self) -> str:
        """What a request to it says in `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class UpstreamConnection(asyncio.Protocol):
    """One connection, and the one exchange that is going on there.

    Mutable state: what of the answer has come and was not taken yet, and who waits for more. The
    loop's thread alone uses it. Reading pauses while more than is worth keeping waits.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamBroken | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.is_used_before = False
        self.idle_since = 0.0
        self._start()

    def _start(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._head_bytes = 0
        self._is_paused = False
        self._has_head = False
        self._has_ended = False
        self._ends_with_connection = False
        self._keeps = False
        self.status = 0
        self.reason: str | None = None
        self.headers: Headers = []
        self.on_failure: Callable[[UpstreamBroken], None] | None = None

    # ---- for whoever forwards ----

    @property
    def is_open(self) -> bool:
        """Whether a request can still be sent."""
        transport = self._transport
        return self._error is None and transport is not None and not transport.is_closing()

    @property
    def has_answered(self) -> bool:
        """Whether anything of an answer has come."""
        return self._has_head

    @property
    def has_ended(self) -> bool:
        """Whether the whole answer has come."""
        return self._has_ended

    @property
    def is_stale(self) -> bool:
        """Whether it was kept from before and brought nothing: perhaps it had been closed."""
        return self.is_used_before and not self._has_head

    def send(self, head: bytes, body: bytes) -> None:
        """Begin an exchange."""
        assert self._transport is not None
        self._start()
        if len(body) < _HIGH_WATER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def end_at(self, when: float, kind: str, text: str) -> None:
        """Fail the exchange at a time of the loop, unless it was told another one since."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self.fail, UpstreamBroken(kind, text))

    async def head(self) -> None:
        """Until `status` and `headers` are there.

        Raises:
            UpstreamBroken: They will not come.
        """
        while not self._has_head:
            await self._more()

    async def chunk(self) -> bytes:
        """The next bytes of the body, empty at its end.

        Raises:
            UpstreamBroken: It breaks off here.
        """
        while not self._chunks:
            if self._has_ended:
                return b""
            await self._more()
        if len(self._chunks) == 1:
            data = self._chunks.popleft()
        else:
            data = b"".join(self._chunks)
            self._chunks.clear()
        self._buffered = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def fail(self, error: UpstreamBroken) -> None:
        """Break the exchange off; who waits is told, and nothing more is read."""
        if self._error is None:
            self._error = error
        self.close()
        self._wake()
        if self.on_failure is not None:
            self.on_failure(error)

    def close(self) -> None:
        """Give the connection up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> bool:
        """The exchange is over; whether the connection can be used again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return self._has_ended and self._keeps and not self._chunks and self.is_open

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by name

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._has_ended:  # more than was asked for
            self.close()
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(UpstreamBroken("garbage", f"it answered no HTTP: {error}"))
            return
        if not self._has_head and self._head_bytes > _MAX_HEAD_BYTES:
            self.fail(UpstreamBroken("garbage", "its headers never end"))
            return
        if self._buffered > _HIGH_WATER_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone."""
        if self._has_head and self._ends_with_connection and error is None:
            self._has_ended = True
        if self._error is None and not self._has_ended:
            reason = str(error) if error is not None else "it closed the connection"
            self._error = UpstreamBroken("reset", reason)
        self._wake()

    # ---- httptools' callbacks ----

    def on_message_begin(self) -> None:
        """Headers begin, perhaps after those of an interim answer."""
        self.headers = []
        self.reason = None

    def on_status(self, reason: bytes) -> None:
        """What is said about the status, perhaps in parts."""
        self.reason = (self.reason or "") + reason.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """The last header."""
        status = self._parser.get_status_code()
        if status < 200:
            return
        self.status = status
        self._has_head = True
        self._keeps = self._parser.should_keep_alive()
        names = {name.lower() for name, _ in self.headers}
        has_length = b"content-length" in names or b"transfer-encoding" in names
        self._ends_with_connection = not has_length and status not in _BODILESS

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        self._chunks.append(data)
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        """The answer's end, or an interim answer's."""
        self._has_ended = self._has_head


class ConnectionPool:
    """The connections to one instance.

    Mutable state: those that are idle, the one used last first; and those in use. The loop's thread
    alone uses it.
    """

    def __init__(
        self, address: Address, connect_seconds: float, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self._connect_seconds = connect_seconds
        self._loop = asyncio.get_running_loop()
        self._tls = (tls or ssl.create_default_context()) if address.is_tls else None
        self._idle: list[UpstreamConnection] = []
        self._in_use: set[UpstreamConnection] = set()

    async def take(self, *, is_fresh: bool = False) -> UpstreamConnection:
        """A connection, an idle one unless it must be fresh.

        Raises:
            UpstreamBroken: None can be made: `refused`, or another `connect` error.
        """
        now = self._loop.time()
        while self._idle and not is_fresh:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < IDLE_SECONDS:
                connection.is_used_before = True
                self._in_use.add(connection)
                return connection
            connection.close()
        address = self.address
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await self._loop.create_connection(
                    UpstreamConnection, address.host, address.port, ssl=self._tls
                )
        except ConnectionRefusedError as error:
            raise UpstreamBroken("refused", "it refuses connections") from error
        except TimeoutError as error:
            raise UpstreamBroken("connect", "it takes no connection in time") from error
        except OSError as error:
            raise UpstreamBroken("connect", f"it cannot be reached: {error}") from error
        self._in_use.add(connection)
        return connection

    def give(self, connection: UpstreamConnection) -> None:
        """A connection is not needed any more; it is kept if its exchange ended well."""
        self._in_use.discard(connection)
        if connection.end():
            connection.idle_since = self._loop.time()
            self._idle.append(connection)
        else:
            connection.close()

    def fail_unanswered(self, error: UpstreamBroken) -> int:
        """Break off all exchanges without an answer yet; how many there were."""
        waiting = [one for one in self._in_use if not one.has_answered]
        for connection in waiting:
            connection.fail(error)
        return len(waiting)

    def close(self) -> None:
        """Close what is idle; what is in use goes on."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
