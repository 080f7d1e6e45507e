"""What a router sees of an engine: vLLM's event stream over ZMQ, decoded without vLLM."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

_END_MARK = (-1).to_bytes(8, "big", signed=True)
_WAIT_MS = 10_000


class EventConsumer:
    """Subscribed from the start; can also ask for everything again."""

    def __init__(self, *, port: int, replay_port: int) -> None:
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(f"tcp://127.0.0.1:{port}")
        self._replay = context.socket(zmq.DEALER)
        self._replay.setsockopt(zmq.RCVTIMEO, _WAIT_MS)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self._received: dict[int, list[dict[str, Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.close(linger=0)
        self._replay.close(linger=0)

    def live_events(self, quiet_seconds: float = 1.0) -> list[dict[str, Any]]:
        """The tier's events so far, once none has come for a while. No batch may be missing."""
        quiet_until = time.monotonic() + quiet_seconds
        while time.monotonic() < quiet_until:
            if self._live.poll(50):
                _, number, payload = self._live.recv_multipart()
                self._received[int.from_bytes(number, "big")] = _events(payload)
                quiet_until = time.monotonic() + quiet_seconds
        numbers = sorted(self._received)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "batches are missing"
        return [event for number in numbers for event in self._received[number]]

    def replayed_events(self) -> list[dict[str, Any]]:
        """The tier's events since the engine started, from its buffer."""
        return [event for payload in self._replayed() for event in _events(payload)]

    def _replayed(self) -> Iterator[bytes]:
        self._replay.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            parts = self._replay.recv_multipart()
            number, payload = parts[-2:]
            if number == _END_MARK:
                return
            yield payload


def _events(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch that speak of Opal's memory tier."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return [event for event in events if event.get("medium") == "CPU"]


def held_blocks(events: list[dict[str, Any]]) -> set[int]:
    """The blocks that the tier holds, if the events are true and make sense in their order."""
    held: set[int] = set()
    for event in events:
        hashes = set(event["block_hashes"])
        assert event["medium"] == "CPU"
        assert len(hashes) == len(event["block_hashes"])
        if event["type"] == "BlockStored":
            parent = event["parent_block_hash"]
            assert not hashes & held, "stored twice"
            assert parent is None or parent in held, "stored behind a block that is not there"
            assert event["block_size"] == 32
            assert len(event["token_ids"]) == 32 * len(hashes)
            held |= hashes
        else:
            assert event["type"] == "BlockRemoved"
            assert hashes <= held, "removed without having been stored"
            held -= hashes
    return held
