"""Writes whose answer nobody waited for: a server that stood still may carry them out later."""

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec

_MOST: Final = 256
_RESET: Final = struct.pack("ii", 1, 0)


class _Doubt(msgspec.Struct, frozen=True, eq=False):
    """A key, and the connection over which it was written, closed on our side."""

    key: str
    connection: socket.socket
    is_taken_back: bool  # its removal follows it over the same connection


class Doubts:
    """What was sent in full without an answer, and may still happen.

    Removing such a key does not help while the write may come after the removal. The server closes
    a connection that we have closed when it has carried out all that came over it: that is awaited.
    Where nobody can wait so long, the removal that was sent behind the write has to do.

    Mutable state: `_doubts`, the oldest first, guarded by `_lock`; only the thread that holds
    `_settling` waits for one of them and closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._doubts: list[_Doubt] = []

    def add(self, key: str, connection: socket.socket, *, is_taken_back: bool) -> None:
        """This key may still be written over this connection, and then be removed again or not."""
        with self._lock:
            self._doubts.append(_Doubt(key, connection, is_taken_back))
            over = self._doubts[:-_MOST]
            del self._doubts[:-_MOST]
        for doubt in over:
            _leave(doubt)

    def settle(self, is_concerned: Callable[[str], bool], deadline: float) -> None:
        """Wait until no such key can be written any more by what was sent before.

        Raises:
            TimeoutError: That is not known yet at the deadline.
        """
        with self._lock:
            if not self._doubts:
                return
        if not self._settling.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _unknown()
        try:
            with self._lock:
                concerned = [doubt for doubt in self._doubts if is_concerned(doubt.key)]
            for doubt in concerned:
                _await_end(doubt.connection, deadline)
                with self._lock, suppress(ValueError):  # it may be over the limit by now
                    self._doubts.remove(doubt)
                doubt.connection.close()
        finally:
            self._settling.release()

    def close(self) -> None:
        """Forget them. What the server carries out later it takes back itself, if it was told."""
        with self._lock:
            doubts, self._doubts = self._doubts, []
        for doubt in doubts:
            _leave(doubt)


def _await_end(connection: socket.socket, deadline: float) -> None:
    """Wait until the server has closed its side, too."""
    try:
        while (left_seconds := deadline - time.monotonic()) > 0:
            connection.settimeout(left_seconds)
            if not connection.recv(4096):
                return
    except TimeoutError:
        pass
    except OSError:
        return  # reset: the server is gone, or knows nothing of this connection
    raise _unknown()


def _unknown() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "the server has not yet answered for what it was sent")


def _leave(doubt: _Doubt) -> None:
    """Let the server have all of it, or, where the removal is missing, as little as can be."""
    if not doubt.is_taken_back:
        with suppress(OSError):
            doubt.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    doubt.connection.close()
