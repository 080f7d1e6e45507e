"""A connection to a server that speaks RESP: a deadline for every call, no copies of values.

`redis` connects, authenticates and encrypts; from then on its socket is used directly: what is sent
comes from many buffers in one call, and a value lands where it is wanted. Its own `get` and `set`
copy a value two or three times.
"""

import errno
import select
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from typing_extensions import Buffer

_MOST_BUFFERS: Final = 1024  # what one call to the kernel takes
_SMALL_BYTES: Final = 64 << 10


class Diverged(Exception):
    """Something else came than was expected; `start` is what was received in its place."""

    def __init__(self, start: bytes) -> None:
        super().__init__(start[:64])
        self.start = start


class RespStream:
    """One connection, used by one thread at a time.

    Mutable state: `sent_bytes`, all bytes ever handed to the kernel. After an exception the
    connection is of no use any more, because nobody knows where in a reply it stands.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._socket: Any = connection._sock
        self._is_encrypted = isinstance(self._socket, ssl.SSLSocket)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.sent_bytes = 0

    def is_idle(self) -> bool:
        """Whether the server has neither closed this connection nor said anything unasked."""
        return not self._poll.poll(0)

    def close(self) -> None:
        """Close it; may be called again."""
        self._connection.disconnect()

    def hand_over(self, last_words: bytes) -> tuple[socket.socket, bool]:
        """Give the bare socket away, with nothing more to be sent; this object is done.

        The server closes it in its turn when it has carried out everything that it was sent. Also
        returned: whether `last_words` are among that, which are sent if they need not wait.
        """
        is_said = False
        with suppress(OSError):  # no room, or the connection is lost
            self._socket.settimeout(0)
            is_said = self._socket.send(last_words) == len(last_words)
        family = self._socket.family
        bare = socket.socket(family, socket.SOCK_STREAM, fileno=self._socket.detach())
        bare.settimeout(None)
        bare.shutdown(socket.SHUT_WR)
        return bare, is_said

    def send(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send all bytes of all buffers.

        Raises:
            TimeoutError: That took too long; some may be sent.
            OSError: The connection is lost.
        """
        left = [view for buffer in buffers if (view := memoryview(buffer).cast("B")).nbytes]
        position = 0
        while position < len(left):
            self._wait_at_most(deadline)
            if self._is_encrypted:
                done = self._socket.send(left[position])
            else:
                done = self._socket.sendmsg(left[position : position + _MOST_BUFFERS])
            self.sent_bytes += done
            position = _advance(left, position, done)

    def fill(self, buffers: Sequence[memoryview], deadline: float) -> None:
        """Receive until all buffers are full.

        Raises:
            TimeoutError: That took too long.
            OSError: The connection is lost.
        """
        left = [view for buffer in buffers if (view := buffer.cast("B")).nbytes]
        position = 0
        while position < len(left):
            self._wait_at_most(deadline)
            if self._is_encrypted or position == len(left) - 1:
                done = self._socket.recv_into(left[position])
            else:
                done = self._socket.recvmsg_into(left[position : position + _MOST_BUFFERS])[0]
            if done == 0:
                raise _lost()
            position = _advance(left, position, done)

    def expect(self, frame: bytes, deadline: float) -> None:
        """Receive these bytes and never more.

        Raises:
            Diverged: Something else came. At most as many bytes as the frame has were received.
            TimeoutError: That took too long.
            OSError: The connection is lost.
        """
        received = b""
        while len(received) < len(frame):
            self._wait_at_most(deadline)
            piece = self._socket.recv(len(frame) - len(received))
            if not piece:
                raise _lost()
            received += piece
            if not frame.startswith(received):
                raise Diverged(received)

    def replies(self, count: int, deadline: float, *, start: bytes = b"") -> list[Any]:
        """So many replies; errors that the server answered are among them, as `ReplyError`.

        `start` was received already.

        Raises:
            TimeoutError: That took too long.
            OSError: The connection is lost, or it is no such server.
        """
        import hiredis

        reader = hiredis.Reader(notEnoughData=Ellipsis)
        reader.feed(start)
        found: list[Any] = []
        try:
            while len(found) < count:
                reply = reader.gets()
                if reply is not Ellipsis:
                    found.append(reply)
                    continue
                self._wait_at_most(deadline)
                piece = self._socket.recv(_SMALL_BYTES)
                if not piece:
                    raise _lost()
                reader.feed(piece)
        except hiredis.HiredisError:
            raise OSError(errno.EPROTO, "the server does not speak RESP") from None
        if reader.has_data():
            raise OSError(errno.EPROTO, "the server answers what was not asked")
        return found

    def _wait_at_most(self, deadline: float) -> None:
        """Let the next call end at the deadline."""
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise TimeoutError(errno.ETIMEDOUT, "the server did not answer in time")
        self._socket.settimeout(left_seconds)


def _advance(buffers: list[memoryview], position: int, done: int) -> int:
    """Drop the first `done` bytes from `position` on; the position of what is left."""
    while position < len(buffers) and done >= len(buffers[position]):
        done -= len(buffers[position])
        position += 1
    if done:
        buffers[position] = buffers[position][done:]
    return position


def _lost() -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, "the server closed the connection")


def pack(*words: bytes) -> bytes:
    """A command as it is sent."""
    head = b"*%d\r\n" % len(words)
    return head + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])
