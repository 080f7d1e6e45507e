"""The two sockets of an instance's event channel. Nothing here waits."""

import contextlib
from collections.abc import Iterator
from typing import Final

import zmq

from opal_connector.cluster.curve import CurveServer, guarding, serve_with
from opal_connector.config import Endpoint

_QUESTION_BYTES: Final = 64 << 10
_WAITING_BATCHES: Final = 256  # for a subscriber that does not read; the others share their bytes
_WAITING_PARTS: Final = 16  # for a consumer that does not read its answer
_LINGER_MILLISECONDS: Final = 300
_PING_MILLISECONDS: Final = 5_000
_SILENCE_MILLISECONDS: Final = 20_000  # a peer that is silent for so long is dropped with its queue

Envelope = tuple[bytes, bytes]  # who asks, what


class ChannelSockets:
    """PUB and ROUTER, bound.

    Mutable state: the sockets, used by the publisher's thread only.
    """

    def __init__(self, ask: zmq.Socket[bytes], publish: zmq.Socket[bytes]) -> None:
        self._ask = ask
        self._publish = publish

    def wait(self, seconds: float) -> bool:
        """Wait for a question, at most so long; returns whether one is there."""
        return bool(self._ask.poll(max(0, round(seconds * 1_000))))

    def publish(self, topic: bytes, payload: bytes) -> None:
        """Send to whoever listens. Who does not read loses it, and nobody waits for him."""
        with contextlib.suppress(zmq.Again):
            self._publish.send_multipart([topic, payload], zmq.NOBLOCK, copy=False)

    def take_question(self) -> Envelope | None:
        """The next question, None if there is none.

        Raises:
            ValueError: Something came that has not the shape of one.
        """
        try:
            frames = self._ask.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) != 3 or frames[1]:
            raise ValueError(f"a question has an empty frame and a payload, not {len(frames)}")
        return frames[0], frames[2]

    def answer(self, identity: bytes, part: bytes) -> bool:
        """Send a part; returns whether it was taken, else it is to be tried again later.

        Raises:
            ConnectionError: Whoever asked is gone.
        """
        try:
            self._ask.send_multipart([identity, b"", part], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise ConnectionError(str(error)) from error
        return True


@contextlib.contextmanager
def open_sockets(
    endpoint: Endpoint, publish_endpoint: Endpoint | None, curve: CurveServer | None = None
) -> Iterator[tuple[ChannelSockets, Endpoint, Endpoint]]:
    """Bind the channel; gives the sockets with their real endpoints.

    Raises:
        OSError: An address cannot be bound; its text says what has to become true.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets: list[zmq.Socket[bytes]] = []
    guard = contextlib.ExitStack()
    try:
        guard.enter_context(guarding(context, curve))
        ask = _socket(context, zmq.ROUTER, endpoint)
        sockets.append(ask)
        ask.setsockopt(zmq.ROUTER_MANDATORY, 1)
        ask.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES)
        ask.setsockopt(zmq.SNDHWM, _WAITING_PARTS)
        ask.setsockopt(zmq.RCVHWM, _WAITING_PARTS)
        serve_with(ask, curve)
        asked = _bind(ask, endpoint)
        wanted = publish_endpoint or (asked.next_to(1) if endpoint.port else endpoint)
        publish = _socket(context, zmq.PUB, wanted)
        sockets.append(publish)
        publish.setsockopt(zmq.SNDHWM, _WAITING_BATCHES)
        serve_with(publish, curve)
        published = _bind(publish, wanted)
        yield ChannelSockets(ask, publish), asked, published
    finally:
        for opened in sockets:
            opened.close(linger=_LINGER_MILLISECONDS)  # the last batch is on its way yet
        guard.close()
        context.term()


def _socket(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: Endpoint
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.IPV6, int(endpoint.host.startswith("[")))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MILLISECONDS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MILLISECONDS)
    return socket


def _bind(socket: "zmq.Socket[bytes]", endpoint: Endpoint) -> Endpoint:
    try:
        socket.bind(endpoint.address)
    except zmq.ZMQError as error:
        raise OSError(f"{endpoint.address} can be bound: {error}") from error
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return Endpoint(endpoint.host, int(bound.rstrip(b"\0").rpartition(b":")[2]))
