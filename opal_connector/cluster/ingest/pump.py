"""A ZMQ socket in an asyncio loop, read many messages at a time."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import zmq

from opal_connector.events.channel import MAX_PAYLOAD_BYTES

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_AT_ONCE: Final = 256  # messages before other sources get their turn
_RECONNECT_MILLISECONDS: Final = 100
_LONGEST_RECONNECT_MILLISECONDS: Final = 5_000
_PING_MILLISECONDS: Final = 5_000
_SILENCE_MILLISECONDS: Final = 15_000  # a peer whose machine is gone sends no FIN


def guarded(call: Callable[[], None], on_fault: Callable[[Exception], None]) -> None:
    """Call, and hand a fault to somebody instead of letting it escape."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - a source's fault must not end the others
        on_fault(error)


class Pump:
    """Hands every message of a socket to a function, from the loop's thread.

    A ZMQ descriptor tells of changes only, so that everything must be read at each of them, and
    after each message sent; `poke` does so. Mutable state: whether it is closed; the loop's thread
    alone uses it.
    """

    def __init__(
        self,
        socket: Socket,
        on_frames: Callable[[list[bytes]], None],
        on_fault: Callable[[Exception], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._on_fault = on_fault
        self._socket = socket
        self._on_frames = on_frames
        self._loop = loop
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._is_closed = False
        loop.add_reader(self._descriptor, self.poke)
        loop.call_soon(self.poke)

    def poke(self) -> None:
        """Read what is there; comes back later for more than a few hundred messages."""
        for _ in range(_AT_ONCE):
            if self._is_closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return  # nothing there, or interrupted: the next change or tick comes back
            guarded(partial(self._on_frames, frames), self._on_fault)
        self._loop.call_soon(self.poke)

    def send(self, frames: list[bytes]) -> None:
        """Send if the socket takes it now; else it is lost, and asked again in time."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:
            return
        self._loop.call_soon(self.poke)

    def close(self) -> None:
        """Read no more."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close(linger=0)


def connect(socket: Socket, endpoint: str) -> None:
    """Connect, or close the socket.

    Raises:
        zmq.ZMQError: The endpoint is none.
    """
    try:
        socket.connect(endpoint)
    except zmq.ZMQError:
        socket.close(linger=0)
        raise


def new_socket(context: Context, kind: int, *, waiting_messages: int) -> Socket:
    """A socket that notices dead peers, comes back to them, and bounds what it keeps."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, waiting_messages)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _LONGEST_RECONNECT_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MILLISECONDS)
    return socket
