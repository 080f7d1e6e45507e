"""The simulated engine behind real sockets, as vLLM's publisher has them; and waiting in a loop."""

import asyncio
import threading
import time
from collections.abc import Callable

import zmq
from simulated_engine import SimulatedEngine

PATIENCE_SECONDS = 20.0


async def eventually(condition: Callable[[], object], what: str = "it") -> None:
    """Let the loop run until something is true that must come true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


class EngineServer:
    """PUB and ROUTER of one engine.

    Mutable state: the engine, guarded by `lock`; the sockets are used with it held, too.
    """

    def __init__(self, engine: SimulatedEngine, *, port: int = 0, replay_port: int = 0) -> None:
        self.engine = engine
        self.lock = threading.Lock()
        self.to_lose = 0  # so many of the next messages are not sent
        self._context = zmq.Context()
        self._stream = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._stream.bind(f"tcp://127.0.0.1:{port or '*'}")
        self._replay.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.endpoint = self._stream.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.replay_endpoint = self._replay.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineServer":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def publish(self) -> None:
        with self.lock:
            for sequence, payload in self.engine.flush(4):
                if self.to_lose:
                    self.to_lose -= 1
                else:
                    self._stream.send_multipart([b"", sequence.to_bytes(8, "big"), payload])

    def send_raw(self, frames: list[bytes]) -> None:
        with self.lock:
            self._stream.send_multipart(frames)

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._is_closing.is_set():
            if not self._replay.poll(20):
                continue
            client, _, first = self._replay.recv_multipart()
            with self.lock:
                for sequence, payload in self.engine.replay(int.from_bytes(first, "big")):
                    number = sequence.to_bytes(8, "big")
                    self._replay.send_multipart([client, b"", b"", number, payload])
            end = (-1).to_bytes(8, "big", signed=True)
            self._replay.send_multipart([client, b"", b"", end, b""])
