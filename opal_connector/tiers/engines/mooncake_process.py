"""The process with Mooncake's library, as the process that wants it sees it."""

import errno
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from opal_connector.mooncake_helper.messages import (
    AddChannel,
    AddMemory,
    Answer,
    Call,
    Piece,
    RemoveMemory,
    Request,
    Setup,
    receive_answer,
    send,
)
from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.engines.mooncake_memory import MappedMemory
from opal_connector.tiers.shared_memory import Placed, SharedMemory, placed_of

_MODULE: Final = "opal_connector.mooncake_helper"
_FAREWELL_SECONDS: Final = 2.0
_LEAST_ROOM_BYTES: Final = 64 << 10
# The library's own waits end before the call does, so that one peer's silence ends one call.
_NATIVE_SHARE: Final = 0.6
_warnings = RateLimitedWarnings(logging.getLogger(__name__))


class Channel:
    """A socket to the process for one call at a time, and memory for what is not shared.

    Mutable state: the memory, which grows; used by one thread at a time.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.room: SharedMemory | None = None


class StoreProcess:
    """One life of the process: from its start to the first call that it leaves without an answer.

    Then it is killed, and waited for: what it had under way cannot write to our memory any more.

    Mutable state: the free channels, guarded by `_lock`; what is said on the first socket, guarded
    by `_turn`; the memory that was offered, used by one thread at a time; what is mapped.
    """

    def __init__(self, *, timeout_seconds: float) -> None:
        """Start the process. It loads the library, and waits to be told where the store is.

        Raises:
            OSError: It cannot be started.
        """
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._numbers = itertools.count()
        self._offered: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self.mapped = MappedMemory()
        self._free: list[Channel] = []
        self.is_ended = False
        self.memories_seen = 0  # how many prepared ones it was told of, by its client's count
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=_environment(timeout_seconds),
                # A Ctrl-C is not for it. No session of its own: Linux shares the processors among
                # sessions, and a busy machine made a read of 4 MiB take 15 ms instead of 3.
                process_group=0,
            )

    def connect(self, setup: Setup, deadline: float) -> None:
        """Let the process reach the store. Blocks.

        Raises:
            OSError: It does not reach it, or has no library; it is ended then.
        """
        answer = self._on_control(setup, None, deadline)
        if answer.codes[0] != 0:
            self.end()
            reason = answer.text or f"Mooncake does not reach its store ({answer.codes[0]})"
            raise OSError(errno.EHOSTUNREACH, reason)

    # ---- memory ----

    def keep_up(self, memories: Sequence[SharedMemory], deadline: float) -> None:
        """Let the process map what it was not offered yet, and forget what has gone.

        Memory that it cannot use is left alone: its bytes go through a channel's room.

        Raises:
            OSError: The process does not answer.
        """
        for number in self.mapped.take_dead():
            self._on_control(RemoveMemory(number), None, deadline)
        for memory in memories:
            if memory in self._offered:
                continue
            code = self._share(placed_of(memory), deadline)
            self._offered.add(memory)
            if code != 0:
                _warnings.warn("memory", "Mooncake cannot use memory, so it is copied (%s)", code)

    def _share(self, placed: Placed, deadline: float) -> int:
        """Let the process map some memory and register it; gives the library's answer."""
        number = next(self._numbers)
        request = AddMemory(number, placed.size_bytes)
        code = self._on_control(request, placed.memory.file, deadline).codes[0]
        if code == 0:
            self.mapped.add(placed, number)
        return code

    def room(self, channel: Channel, size_bytes: int, deadline: float) -> memoryview:
        """Shared memory of the channel's own, with space for so much.

        Raises:
            OSError: The process cannot use it, or does not answer.
        """
        if channel.room is None or len(channel.room) < size_bytes:
            size = max(_LEAST_ROOM_BYTES, 1 << (size_bytes - 1).bit_length())
            memory = SharedMemory(size)
            code = self._share(placed_of(memory), deadline)
            if code != 0:
                raise OSError(errno.ENOMEM, f"Mooncake registers no memory ({code})")
            channel.room = memory
        return memoryview(channel.room)[:size_bytes]

    # ---- calls ----

    def take(self, deadline: float) -> Channel:
        """A channel for one call.

        Raises:
            OSError: The process ended.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._on_control(AddChannel(), theirs.fileno(), deadline)
        except BaseException:
            ours.close()
            raise
        return Channel(ours)

    def give_back(self, channel: Channel) -> None:
        """The channel's call has got its answer, or was never sent."""
        with self._lock:
            if not self.is_ended:
                self._free.append(channel)
                return
        channel.socket.close()

    def ask(self, channel: Channel, call: Call, deadline: float) -> Answer:
        """The answer to a call. If there is none in time this is the process's end.

        Raises:
            TimeoutError: There was none in time.
            OSError: The process ended before.
        """
        return self._exchange(channel.socket, call, None, deadline)

    def end(self) -> None:
        """Kill the process. When this returns it is gone."""
        with self._lock:
            self.is_ended = True
            channels, self._free = self._free, []
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes who waits; closed with the last use
        for channel in channels:
            channel.socket.close()

    def leave(self) -> None:
        """Let the process take its leave of the store; then it is gone."""
        with self._lock:
            self.is_ended = True
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)
        self.end()
        self._control.close()

    # ---- inside ----

    def _on_control(self, request: Request, file: int | None, deadline: float) -> Answer:
        if not self._turn.acquire(timeout=max(0.001, deadline - time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "the process with Mooncake's library is busy")
        try:
            return self._exchange(self._control, request, file, deadline)
        finally:
            self._turn.release()

    def _exchange(
        self, channel: socket.socket, request: Request, file: int | None, deadline: float
    ) -> Answer:
        try:
            channel.settimeout(max(0.001, deadline - time.monotonic()))
            send(channel, request, file)
            return receive_answer(channel, deadline)
        except TimeoutError as error:
            self.end()
            raise TimeoutError(errno.ETIMEDOUT, "Mooncake did not answer in time") from error
        except (EOFError, OSError) as error:
            self.end()
            raise OSError(errno.EPIPE, "the process with Mooncake's library ended") from error
        except BaseException:  # an interrupt: nobody waits for the answer any more
            self.end()
            raise


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, adjoining ones as one: the library moves each by itself."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last and last.memory == piece.memory and last.offset + last.size_bytes == piece.offset:
            found[-1] = Piece(last.memory, last.offset, last.size_bytes + piece.size_bytes)
        else:
            found.append(piece)
    return found


def _environment(timeout_seconds: float) -> dict[str, str]:
    """The library's settings: quiet, and with waits that end. The user's own go first."""
    native_seconds = max(0.1, _NATIVE_SHARE * timeout_seconds)
    milliseconds, whole_seconds = str(int(1000 * native_seconds)), str(max(1, int(native_seconds)))
    return {
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": whole_seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": whole_seconds,
        "MC_HANDSHAKE_CONNECT_TIMEOUT": whole_seconds,
        "MC_STORE_CLIENT_SETUP_RETRIES": "2",
        "GLOG_minloglevel": "3",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
