"""The sockets of one instance on the native channel."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import zmq

from opal_connector.cluster.curve import ask_with
from opal_connector.cluster.ingest.native_machine import Action, Ask, NativeMachine
from opal_connector.cluster.ingest.pump import Context, Pump, connect, new_socket
from opal_connector.cluster.ingest.sources import NativeSource, SourceStatus
from opal_connector.config import ConfigError
from opal_connector.events.channel import (
    MessageError,
    Published,
    Reply,
    decode_published,
    decode_reply,
    encode_message,
)

TOPIC: Final = b"opal1"
_WAITING_MESSAGES: Final = 1_000
_WAITING_QUESTIONS: Final = 4

_Message = TypeVar("_Message")


class NativeShell:
    """Carries messages between one instance and its state machine.

    Mutable state: the sockets; the loop's thread alone uses it.
    """

    def __init__(
        self,
        source: NativeSource,
        machine: NativeMachine,
        context: Context,
        clock: Callable[[], float],
        on_fault: Callable[[Exception], None],
    ) -> None:
        self._on_fault = on_fault
        self.source = source
        self.machine = machine
        self._context = context
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        ask = new_socket(context, zmq.DEALER, waiting_messages=_WAITING_MESSAGES)
        ask.setsockopt(zmq.SNDHWM, _WAITING_QUESTIONS)
        ask_with(ask, source.curve)
        connect(ask, source.endpoint)
        self._ask = Pump(ask, self._on_reply, self._on_fault, self._loop)
        self._stream: Pump | None = None

    def tick(self) -> None:
        """Let time pass, and read what no descriptor told of."""
        self._ask.poke()
        if self._stream is not None:
            self._stream.poke()
        self._act(self.machine.on_tick(self._clock()))

    def begin_again(self) -> None:
        """A message could not be applied."""
        self._act(self.machine.on_fault(self._clock()))

    def resync(self) -> None:
        """Somebody doubts what is known of it."""
        self._act(self.machine.resync(self._clock()))

    def status(self) -> SourceStatus:
        """Where it stands."""
        worker_id = self.machine.worker_id
        return SourceStatus(
            name=self.source.name,
            endpoint=self.source.endpoint,
            is_native=True,
            state=self.machine.state,
            is_settled=self.machine.is_settled,
            worker_ids=(worker_id,) if worker_id is not None else (),
            applied=self.machine.applied,
            metrics=self.machine.metrics,
        )

    def close(self) -> None:
        """Follow no more."""
        self._ask.close()
        if self._stream is not None:
            self._stream.close()

    def _on_published(self, frames: list[bytes]) -> None:
        payload = frames[-1]
        message: Published | None = None
        if len(frames) == 2:
            message = _read(decode_published, payload)
        if message is None:
            self._act(self.machine.on_malformed(len(payload), self._clock()))
        else:
            self._act(self.machine.on_published(message, len(payload), self._clock()))

    def _on_reply(self, frames: list[bytes]) -> None:
        payload = frames[-1]
        reply: Reply | None = None
        if len(frames) == 2 and not frames[0]:
            reply = _read(decode_reply, payload)
        if reply is None:
            self._act(self.machine.on_malformed(len(payload), self._clock()))
        else:
            self._act(self.machine.on_reply(reply, len(payload), self._clock()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Ask):
                self._ask.send([b"", encode_message(action.question)])
            else:
                self._subscribe(action.publish_endpoint)

    def _subscribe(self, publish_endpoint: str) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        stream = new_socket(self._context, zmq.SUB, waiting_messages=_WAITING_MESSAGES)
        stream.setsockopt(zmq.SUBSCRIBE, TOPIC)
        try:
            ask_with(stream, self.source.curve)
            connect(stream, with_host_of(publish_endpoint, self.source.endpoint))
        except (zmq.ZMQError, ConfigError):  # without a stream it goes stale, and says so
            self.machine.metrics.malformed += 1
            return
        self._stream = Pump(stream, self._on_published, self._on_fault, self._loop)


def with_host_of(endpoint: str, other: str) -> str:
    """An endpoint that names no host is at the host of another one."""
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if host not in ("*", "0.0.0.0", "::", "[::]"):
        return endpoint
    reached, _, _ = other.partition("://")[2].rpartition(":")
    return f"{scheme}://{reached}:{port}"


def _read(decode: Callable[[bytes], _Message], payload: bytes) -> _Message | None:
    try:
        return decode(payload)
    except MessageError:
        return None
