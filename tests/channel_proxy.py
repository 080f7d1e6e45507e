"""A bad network between an instance's event channel and whoever follows it, over real sockets."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Self

import msgspec
import zmq

from opal_connector.events.channel import (
    Batch,
    Description,
    Reply,
    decode_published,
    decode_reply,
    encode_message,
)

_POLL_MS = 50


class ChannelProxy:
    """Passes questions, answers and publications on, and loses or repeats batches.

    `copies` says of a batch how often it arrives: 0 loses it. Consumers are told of the proxy's own
    address. Mutable state: the sockets, which only the thread uses, and what was lost and answered.
    """

    def __init__(self, endpoint: str, publish_endpoint: str, copies: Callable[[int], int]) -> None:
        self._copies = copies
        self._backend = endpoint
        self._context = zmq.Context()
        self._questions = self._context.socket(zmq.ROUTER)
        port = self._questions.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._published = self._context.socket(zmq.SUB)
        self._published.setsockopt(zmq.SUBSCRIBE, b"")
        self._published.connect(publish_endpoint)
        self._out = self._context.socket(zmq.PUB)
        self._out_port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self._askers: dict[bytes, zmq.Socket[bytes]] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lost_batches = 0
        self.answered: Counter[type[Reply]] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ends.is_set():
            poller = zmq.Poller()
            for socket in (self._questions, self._published, *self._askers.values()):
                poller.register(socket, zmq.POLLIN)
            ready = {socket for socket, _ in poller.poll(_POLL_MS)}
            if self._questions in ready:
                identity, *frames = self._questions.recv_multipart()
                self._asker(identity).send_multipart(frames)
            if self._published in ready:
                self._publish(*self._published.recv_multipart())
            for identity, socket in list(self._askers.items()):
                if socket in ready:
                    empty, payload = socket.recv_multipart()
                    self._questions.send_multipart([identity, empty, self._rewritten(payload)])

    def _asker(self, identity: bytes) -> "zmq.Socket[bytes]":
        if identity not in self._askers:
            socket = self._context.socket(zmq.DEALER)
            socket.connect(self._backend)
            self._askers[identity] = socket
        return self._askers[identity]

    def _rewritten(self, payload: bytes) -> bytes:
        reply = decode_reply(payload)
        self.answered[type(reply)] += 1
        if not isinstance(reply, Description):
            return payload
        here = f"tcp://127.0.0.1:{self._out_port}"
        return encode_message(msgspec.structs.replace(reply, publish_endpoint=here))

    def _publish(self, topic: bytes, payload: bytes) -> None:
        message = decode_published(payload)
        copies = self._copies(message.sequence) if isinstance(message, Batch) else 1
        self.lost_batches += copies == 0
        for _ in range(copies):
            self._out.send_multipart([topic, payload])
