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
_PATIENCE_SECONDS: Final = 60.0  # far longer than a server that is well needs to carry out a write
_RESET: Final = struct.pack("ii", 1, 0)


class _Doubt(msgspec.Struct, frozen=True, eq=False):
    """A key, and the connection over which it was written, closed on our side."""

    key: str
    connection: socket.socket
    is_taken_back: bool  # its removal follows it over the same connection
    until: float  # when nobody waits for its end any more


class Doubts:
    """What was sent in full without an answer, and may still happen.

    Removing such a key does not help while the write may come after the removal. The server closes
    a connection that we have closed when it has carried out all that came over it: that is awaited.
    Where nobody can wait so long, the removal that was sent behind the write has to do. So it
    is after `patience_seconds`, too: a server that vanished without a word closes nothing, and as
    long as it was waited for, the one in its place would not be used.

    Mutable state: `_doubts`, the oldest first, guarded by `_lock`; only the thread that holds
    `_settling` waits for one of them and closes it.
    """

    def __init__(self, *, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._settling = threading.Lock()
        self._doubts: list[_Doubt] = []

    def add(self, key: str, connection: socket.socket, *, is_taken_back: bool) -> None:
        """This key may still be written over this connection, and then be removed again or not."""
        until = time.monotonic() + self._patience_seconds
        with self._lock:
            self._doubts.append(_Doubt(key, connection, is_taken_back, until))
            over = self._doubts[:-_MOST]
            del self._doubts[:-_MOST]
        for doubt in over:
            _leave(doubt)

    def settle(self, is_concerned: Callable[[str], bool], deadline: float) -> None:
        """Wait until no such key can be written any more by what was sent before, as far as it can.

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
                has_ended = _has_ended(doubt.connection, min(deadline, doubt.until))
                if not has_ended and time.monotonic() < doubt.until:
                    raise _unknown()
                with self._lock, suppress(ValueError):  # it may be over the limit by now
                    self._doubts.remove(doubt)
                _leave(doubt)
        finally:
            self._settling.release()

    def close(self) -> None:
        """Forget them. What the server carries out later it takes back itself, if it was told."""
        with self._lock:
            doubts, self._doubts = self._doubts, []
        for doubt in doubts:
            _leave(doubt)


def _has_ended(connection: socket.socket, deadline: float) -> bool:
    """Whether the server has closed its side, too, at the latest at the deadline."""
    try:
        while True:
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            if not connection.recv(4096):
                return True
            if time.monotonic() >= deadline:
                return False
    except (TimeoutError, BlockingIOError):
        return False
    except OSError:
        return True  # reset: the server is gone, or knows nothing of this connection


def _unknown() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "the server has not yet answered for what it was sent")


def _leave(doubt: _Doubt) -> None:
    """Let the server have all of it, or, where the removal is missing, as little as can be."""
    if not doubt.is_taken_back:
        with suppress(OSError):
            doubt.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    doubt.connection.close()
