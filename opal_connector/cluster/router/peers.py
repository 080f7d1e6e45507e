"""How the processes of one router reach each other: a stream from each to each, kept up."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

from opal_connector.cluster.router.peer_messages import (
    Hello,
    Message,
    encode_frame,
    read_frame,
)
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_AGAIN_SECONDS: Final = 0.1
_SETTLE_POLL_SECONDS: Final = 0.01
_WAITING_BYTES: Final = 64 << 20  # for a process that does not read


class PeerBooks(Protocol):
    """What is told to other processes, and what is made of what they tell."""

    def standing(self) -> Iterable[Message]:
        """Everything that a process must know which heard nothing so far."""

    def hear(self, peer: int, message: Message) -> None:
        """Another process tells something."""

    def lose(self, peer: int) -> None:
        """Another process is gone, with everything that it told."""


class Peers:
    """The other processes of this router.

    What is told arrives whole and in order, or the stream ends and begins anew with everything that
    counts then; so no count can go wrong for good. Mutable state: the streams to and from the
    others, and what is to be written in this turn of the loop, whose thread alone uses it.

    Args:
        directory: Where the sockets are; private to the router.
        number: Which of the processes this is.
        count: How many there are.
        books: What is told and heard.
    """

    def __init__(self, directory: Path, number: int, count: int, books: PeerBooks) -> None:
        self._directory = directory
        self.number = number
        self.count = count
        self._books = books
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._heard: dict[int, asyncio.StreamReader] = {}
        self._tried: set[int] = set()
        self._settled: set[int] = set()
        self._pending: list[bytes] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def reached(self) -> frozenset[int]:
        """The processes that what is told here reaches."""
        return frozenset(self._writers)

    async def start(self) -> None:
        """Begin to listen to the others and to speak to them."""
        path = self._path(self.number)
        path.unlink(missing_ok=True)  # of a process that was here before
        self._server = await asyncio.start_unix_server(self._listen, path)
        for other in range(self.count):
            if other != self.number:
                self._tasks.add(asyncio.create_task(self._speak(other)))

    async def settle(self, seconds: float) -> None:
        """Wait until those who are there have told what counts, or for so long."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            if len(self._tried) == self.count - 1 and self._writers.keys() <= self._settled:
                return
            await asyncio.sleep(_SETTLE_POLL_SECONDS)

    async def close(self) -> None:
        """End all streams."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    def tell(self, message: Message) -> None:
        """Tell all others, in this turn of the loop."""
        if not self._writers:
            return  # whoever comes is told everything
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(encode_frame(message))

    # ---- inside ----

    def _path(self, number: int) -> Path:
        return self._directory / f"peer-{number}.sock"

    def _flush(self) -> None:
        data, self._pending = b"".join(self._pending), []
        for number, writer in list(self._writers.items()):
            if writer.transport.get_write_buffer_size() > _WAITING_BYTES:
                logger.warning("router process %d does not listen; it is told anew", number)
                writer.transport.abort()
                del self._writers[number]
            else:
                writer.write(data)

    async def _speak(self, other: int) -> None:
        """Keep a stream to another process."""
        while True:
            try:
                with contextlib.suppress(OSError):
                    await self._speak_once(other)
            except Exception as error:  # noqa: BLE001 - it begins anew, with all that counts
                warnings.warn("speak", "router process %d cannot be told: %r", other, error)
            self._tried.add(other)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _speak_once(self, other: int) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path(other))
        try:
            self._flush()  # what is pending is in the standing as well
            frames = [Hello(self.number), *self._books.standing()]
            writer.write(b"".join(map(encode_frame, frames)))
            self._writers[other] = writer
            self._tried.add(other)
            await reader.read()  # nothing comes on it but its end
        finally:
            if self._writers.get(other) is writer:
                del self._writers[other]
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        peer: int | None = None
        try:
            hello = await read_frame(reader)
            if not isinstance(hello, Hello):
                raise ValueError("a stream that does not say whose it is")
            peer = hello.number
            self._heard[peer] = reader
            self._books.lose(peer)  # what an earlier stream of it told
            while True:
                message = await read_frame(reader)
                if self._heard.get(peer) is not reader:
                    break
                self._books.hear(peer, message)
                self._settled.add(peer)
        except (EOFError, OSError, asyncio.CancelledError):
            pass  # it has ended, or this process does: nobody waits for this task
        except Exception:
            logger.exception("what another process of this router told cannot be understood")
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
            if peer is not None and self._heard.get(peer) is reader:
                del self._heard[peer]
                self._books.lose(peer)
