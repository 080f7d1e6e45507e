"""The sockets of one engine's own event stream."""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from opal_connector.cluster.ingest.pump import Context, Pump, Socket, connect, new_socket
from opal_connector.cluster.ingest.sources import SourceStatus, VllmSource
from opal_connector.cluster.ingest.vllm_machine import VllmMachine
from opal_connector.cluster.ingest.vllm_replay import AskReplayFrom

_WAITING_MESSAGES: Final = 10_000
# An engine sends its whole replay at once, and drops what does not fit into its own queue.
_WAITING_REPLAYED: Final = 20_000
_END: Final = (1 << 64) - 1  # -1, as it looks unsigned


class VllmShell:
    """Carries messages between one engine and its state machine.

    Every replay has its own socket, so that nothing of an earlier answer is taken for a part of a
    later one. Mutable state: the sockets; the loop's thread alone uses it.
    """

    def __init__(
        self,
        source: VllmSource,
        machine: VllmMachine,
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
        self._replay: Pump | None = None
        if source.replay_endpoint is not None:
            # Whoever adds the source is told of a mistake; later nobody could be.
            self._replay_socket(source.replay_endpoint).close(linger=0)
        stream = new_socket(context, zmq.SUB, waiting_messages=_WAITING_MESSAGES)
        stream.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        # It has no reader besides the pump, and ends with its socket.
        monitor = stream.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor = Pump(monitor, self._on_event, self._on_fault, self._loop)
        try:
            if source.is_bound:
                stream.bind(source.endpoint)
            else:
                stream.connect(source.endpoint)
        except zmq.ZMQError:
            self._monitor.close()
            stream.close(linger=0)
            raise
        self._raw_stream = stream
        self._stream = Pump(stream, self._on_message, self._on_fault, self._loop)

    def tick(self) -> None:
        """Let time pass, and read what no descriptor told of."""
        self._monitor.poke()
        self._stream.poke()
        if self._replay is not None:
            self._replay.poke()
        self._act(self.machine.on_tick(self._clock()))

    def begin_again(self) -> None:
        """A message could not be applied."""
        self._act(self.machine.on_fault(self._clock()))

    def resync(self) -> None:
        """Somebody doubts what is known of it."""
        self.begin_again()

    def status(self) -> SourceStatus:
        """Where it stands."""
        return SourceStatus(
            name=self.source.name,
            endpoint=self.source.endpoint,
            is_native=False,
            state=self.machine.state,
            is_settled=self.machine.is_settled,
            worker_ids=tuple(self.machine.ranks.worker_ids()),
            applied=self.machine.applied,
            metrics=self.machine.metrics,
        )

    def close(self) -> None:
        """Follow no more."""
        self._monitor.close()
        self._raw_stream.disable_monitor()
        self._stream.close()
        self._end_replay()

    def _on_event(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if event == zmq.EVENT_DISCONNECTED:
            self._end_replay()
            self._act(self.machine.on_disconnected(self._clock()))
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._act(self.machine.on_connected(self._clock()))

    def _on_message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            size = sum(map(len, frames))
            self._act(self.machine.on_malformed(size, self._clock()))
            return
        sequence = int.from_bytes(frames[1], "big")
        self._act(self.machine.on_message(sequence, frames[2], self._clock()))

    def _on_replayed(self, frames: list[bytes]) -> None:
        # Older engines leave out the topic.
        if len(frames) < 3 or len(frames[-2]) != 8:
            size = sum(map(len, frames))
            self._act(self.machine.on_malformed(size, self._clock()))
            return
        sequence = int.from_bytes(frames[-2], "big")
        if sequence == _END:
            self._end_replay()
            self._act(self.machine.on_replay_end(self._clock()))
        else:
            self._act(self.machine.on_replayed(sequence, frames[-1], self._clock()))

    def _act(self, asks: list[AskReplayFrom]) -> None:
        for ask in asks:
            self._end_replay()
            if self.source.replay_endpoint is None:
                continue
            socket = self._replay_socket(self.source.replay_endpoint)
            self._replay = Pump(socket, self._on_replayed, self._on_fault, self._loop)
            self._replay.send([b"", ask.first_sequence.to_bytes(8, "big")])

    def _replay_socket(self, endpoint: str) -> Socket:
        socket = new_socket(self._context, zmq.DEALER, waiting_messages=_WAITING_REPLAYED)
        connect(socket, endpoint)
        return socket

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close()
            self._replay = None
