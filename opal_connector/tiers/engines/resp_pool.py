"""Connections to one server, lent to one thread at a time."""

import errno
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from opal_connector.tiers.engines.resp_errors import failed_connect
from opal_connector.tiers.engines.resp_stream import RespStream

Result = TypeVar("Result")


class RespPool:
    """At most `connections` connections at once; more threads wait for one.

    Mutable state, guarded by `_lock`: `_idle`, connections that nobody uses, and whether the pool
    is closed.
    """

    def __init__(self, make: Callable[[float], Any], *, connections: int) -> None:
        """`make` gives an unconnected connection of `redis` with this timeout in seconds."""
        self._make = make
        self._free = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[RespStream] = []
        self._is_closed = False

    def run(self, exchange: Callable[[RespStream, float], Result], deadline: float) -> Result:
        """What `exchange` returns, with a connection of its own. Blocks until the deadline at most.

        Where a connection from before turns out to be lost and nothing was sent, another one is
        tried, once.

        Raises:
            TimeoutError: The deadline passed.
            OSError: There is no connection, or what `exchange` raises; the connection is closed.
        """
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "all connections to the server are in use")
        try:
            stream = self._idle_stream()
            if stream is not None:
                sent_before = stream.sent_bytes
                try:
                    return self._lend(stream, exchange, deadline)
                except ConnectionError:
                    if stream.sent_bytes != sent_before:
                        raise
            return self._lend(self._connected(deadline), exchange, deadline)
        finally:
            self._free.release()

    def close(self) -> None:
        """Close what nobody uses; what is in use is closed when it is given back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def _lend(
        self,
        stream: RespStream,
        exchange: Callable[[RespStream, float], Result],
        deadline: float,
    ) -> Result:
        try:
            result = exchange(stream, deadline)
        except TimeoutError:  # of the socket, which has no number
            stream.close()
            raise TimeoutError(errno.ETIMEDOUT, "the server did not answer in time") from None
        except BaseException:
            stream.close()
            raise
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(stream)
        if not is_kept:
            stream.close()
        return result

    def _idle_stream(self) -> RespStream | None:
        """The connection that was used last and is still good."""
        while True:
            with self._lock:
                stream = self._idle.pop() if self._idle else None
            if stream is None or stream.is_idle():
                return stream
            stream.close()

    def _connected(self, deadline: float) -> RespStream:
        """A new connection.

        Names are resolved, several addresses are tried and keys exchanged, each with a time limit
        of its own or none: a thread does it, which is left alone when the time for all has passed.
        """
        left_seconds = max(0.001, deadline - time.monotonic())
        connection = self._make(left_seconds)
        outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def connect() -> None:
            try:
                connection.connect()
            except Exception as error:  # noqa: BLE001 - raised again by who waits for it
                outcome.put(error)
            else:
                outcome.put(None)

        threading.Thread(target=connect, name="opal-connect", daemon=True).start()
        try:
            error = outcome.get(timeout=left_seconds)
        except queue.Empty:
            # Whoever still waits for bytes wakes up; the connection closes with its last user.
            with suppress(OSError, AttributeError):
                connection._sock.shutdown(socket.SHUT_RDWR)
            raise TimeoutError(errno.ETIMEDOUT, "the server did not answer in time") from None
        if error is not None:
            raise failed_connect(error) from None
        return RespStream(connection)
