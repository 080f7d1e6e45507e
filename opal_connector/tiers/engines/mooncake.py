"""`MooncakeClient`: values in a Mooncake Store, through its own library in a process of its own.

Why a process. Observed with version 0.3.13.post1 of the library: `setup` holds the interpreter's
lock for as long as the master is silent (90 seconds with one that is gone); loading it brings a Go
runtime with handlers for SIGSEGV, SIGBUS and SIGFPE and some 30 threads; calls that a paused master
or peer does not answer wait 30 seconds, and what they move into memory then still arrives; at
exit it asks the network again. None of it reaches an engine from another process, and a process
that is killed writes to nobody's memory. The memory itself is mapped by both, so nothing is copied.

What the store does, and what is made of it:

* A put of a key that exists answers 0 and changes nothing. Puts go through a put session, which
  says so: what is there stays if it is the same, byte by byte, else it is removed by force.
* A value that is being written cannot be removed, and is not there for readers. One whose writer is
  gone is given up by the master after 30 seconds; until then its key takes no value.
* Reads and questions whether a value is there lease it (10 seconds unless the master is told
  otherwise): nothing evicts it meanwhile, and it counts as used. A removal by force goes through.
* A store without space answers at once, and evicts then.
"""

import errno
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import ClassVar, Final

import msgspec
import numpy as np
from typing_extensions import Buffer, override

from opal_connector.mooncake_helper.messages import (
    NOT_FOUND,
    NOT_READY,
    Answer,
    Call,
    Get,
    GetStart,
    Part,
    Piece,
    Present,
    Put,
    Remove,
    RemoveMatching,
    Setup,
)
from opal_connector.tiers.base import Rows
from opal_connector.tiers.engines.client import EngineClient, Span
from opal_connector.tiers.engines.libraries import require_libraries
from opal_connector.tiers.engines.mooncake_errors import failure
from opal_connector.tiers.engines.mooncake_process import Channel, StoreProcess, merged
from opal_connector.tiers.shared_memory import SharedMemory, address_of, shared_memory_of

_START_SECONDS: Final = 30.0  # to load the library and to register memory


class _Session:
    """One call's turn with the process: a channel, and how long there is."""

    def __init__(self, process: StoreProcess, channel: Channel, deadline: float) -> None:
        self._process = process
        self._channel = channel
        self.deadline = deadline

    def ask(self, call: Call) -> Answer:
        """The answer to a call."""
        return self._process.ask(self._channel, call, self.deadline)

    def pieces(self, views: Sequence[memoryview]) -> tuple[list[Piece], list[memoryview | None]]:
        """What buffers are for the process, and for those that it cannot map what stands in."""
        piece_at = self._process.mapped.piece_at
        pieces = [piece_at(address_of(view), view.nbytes) for view in views]
        missing = sum(
            view.nbytes for view, piece in zip(views, pieces, strict=True) if piece is None
        )
        if not missing:
            return [piece for piece in pieces if piece is not None], [None] * len(views)
        room = self._process.room(self._channel, missing, self.deadline)
        stand_ins: list[memoryview | None] = []
        found: list[Piece] = []
        position = 0
        for view, piece in zip(views, pieces, strict=True):
            stand_in = None
            if piece is None:
                stand_in = room[position : position + view.nbytes]
                position += view.nbytes
                piece = piece_at(address_of(stand_in), view.nbytes)
                assert piece is not None
            found.append(piece)
            stand_ins.append(stand_in)
        return found, stand_ins


class MooncakeClient(EngineClient):
    """Values in one store, under `<prefix>/<key>`.

    With `segment_bytes` this process gives the store memory, in a second process that lives until
    `close`: what is in it is lost then.

    Mutable state: the processes, and the memory that was prepared as long as somebody else has it,
    guarded by `_lock`.
    """

    can_list: ClassVar[bool] = False  # the master tells all keys of everybody, or none

    def __init__(  # noqa: PLR0913 - a setting each
        self,
        *,
        master: str,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        device: str = "",
        local_host: str = "",
        segment_bytes: int = 0,
        buffer_bytes: int = 64 << 20,
        replicas: int = 1,
        prefix: str = "opal",
        timeout_seconds: float,
    ) -> None:
        """`buffer_bytes` is the library's own memory, used where a value is there already.

        Raises:
            ConfigError: The library is not installed.
        """
        require_libraries("Mooncake")
        self._setup = Setup(
            master, metadata, protocol, device, local_host, 0, buffer_bytes, replicas
        )
        self._segment_bytes = segment_bytes
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._sharing = threading.Lock()
        self._process: Future[StoreProcess] | None = None
        self._provider: Future[StoreProcess] | None = None
        self._memories: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._memories_seen = 0
        self._is_closed = False
        # Ready when the first call comes: to load the library takes longer than a call may.
        self._spare: Future[StoreProcess] | None = _started(timeout_seconds)

    @override
    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        views = _views(parts)
        with self._session() as session:
            pieces, stand_ins = session.pieces(views)
            for view, stand_in in zip(views, stand_ins, strict=True):
                if stand_in is not None:
                    _copy(stand_in, view)
            seconds = session.deadline - time.monotonic()
            answer = session.ask(Put(self._name(key), merged(pieces), seconds))
        if answer.codes[0] != 0:
            raise failure(answer, key, is_put=True)

    @override
    def get(self, key: str, size_bytes: int, spans: Sequence[Span]) -> None:
        views = [_views(span.buffers) for span in spans]
        with self._session() as session:
            pieces, stand_ins = session.pieces([view for some in views for view in some])
            rest = iter(pieces)
            parts = [
                Part(span.offset, merged([next(rest) for _ in some]))
                for span, some in zip(spans, views, strict=True)
            ]
            answer = session.ask(Get(self._name(key), size_bytes, parts))
            if answer.codes[0] < 0:
                raise failure(answer, key)
            for view, stand_in in zip(
                (view for some in views for view in some), stand_ins, strict=True
            ):
                if stand_in is not None:
                    _copy(view, stand_in)

    @override
    def get_start(self, key: str, size_bytes: int) -> bytes:
        start = memoryview(bytearray(size_bytes))
        with self._session() as session:
            pieces, stand_ins = session.pieces([start])
            answer = session.ask(GetStart(self._name(key), pieces[0]))
            if answer.codes[0] < 0:
                raise failure(answer, key)
            stand_in = stand_ins[0]
            return bytes((stand_in or start)[: answer.codes[0]])

    @override
    def present(self, keys: Sequence[str]) -> list[bool]:
        codes = self._ask_for(keys, Present)
        return [code == 1 for code in codes]

    @override
    def remove(self, keys: Sequence[str]) -> None:
        """A value that is being written is not there yet: it is none that could be removed."""
        self._ask_for(keys, Remove, NOT_FOUND, NOT_READY)

    @override
    def remove_under(self, prefix: str) -> None:
        with self._session() as session:
            answer = session.ask(RemoveMatching(f"^{re.escape(self._name(prefix))}"))
        if answer.codes[0] < 0:
            raise failure(answer, prefix)

    @override
    def touch(self, keys: Sequence[str]) -> None:
        self.present(keys)  # to ask for a value is to use it

    @override
    def prepare(self, rows: Rows) -> None:
        """Memory of `allocate_host_rows` is mapped with the next call; any other is copied."""
        memory = shared_memory_of(rows)
        if memory is not None and memory not in self._memories:
            with self._lock:
                self._memories.add(memory)
                self._memories_seen += 1

    @override
    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            futures = (self._process, self._provider, self._spare)
            self._process = self._provider = self._spare = None
        for future in futures:
            if future is not None:
                future.add_done_callback(_leave)

    # ---- inside ----

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _ask_for(
        self, keys: Sequence[str], call: Callable[[list[str]], Call], *harmless: int
    ) -> list[int]:
        if not keys:
            return []
        with self._session() as session:
            answer = session.ask(call([self._name(key) for key in keys]))
        if len(answer.codes) != len(keys):
            raise failure(answer, keys[0])
        for key, code in zip(keys, answer.codes, strict=True):
            if code < 0 and code not in harmless:
                raise failure(Answer([code], answer.text), key)
        return answer.codes

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        deadline = time.monotonic() + self._timeout_seconds
        process = self._running(deadline)
        self._share_more(process, deadline)
        channel = process.take(deadline)
        try:
            yield _Session(process, channel, deadline)
        finally:
            process.give_back(channel)

    def _share_more(self, process: StoreProcess, deadline: float) -> None:
        """Let the process map what was prepared since, and forget what has gone."""
        if process.memories_seen == self._memories_seen and not process.mapped.has_dead:
            return
        if not self._sharing.acquire(timeout=max(0.001, deadline - time.monotonic())):
            raise TimeoutError(errno.ETIMEDOUT, "memory is being registered with Mooncake")
        try:
            with self._lock:
                seen, memories = self._memories_seen, list(self._memories)
            process.keep_up(memories, deadline)
            process.memories_seen = seen
        finally:
            self._sharing.release()

    def _running(self, deadline: float) -> StoreProcess:
        """The process, started if there is none."""
        with self._lock:
            if self._is_closed:
                raise OSError(errno.EBADF, "the client is closed")
            if self._segment_bytes and _is_over(self._provider):
                self._provider = self._connected(self._segment_bytes)
            if _is_over(self._process):
                self._process = self._connected(0)
            future = self._process
        assert future is not None
        try:
            return future.result(max(0.001, deadline - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, "Mooncake's library is not ready yet") from error
        except OSError as error:
            raise OSError(error.errno, error.strerror) from error  # one for each who waits

    def _connected(self, segment_bytes: int) -> "Future[StoreProcess]":
        """A process that is on its way to the store."""
        spare, self._spare = self._spare, None
        future: Future[StoreProcess] = Future()
        begun = spare or _started(self._timeout_seconds)
        threading.Thread(
            target=self._connect, args=(begun, future, segment_bytes), daemon=True
        ).start()
        return future

    def _connect(
        self, begun: "Future[StoreProcess]", future: "Future[StoreProcess]", segment_bytes: int
    ) -> None:
        deadline = time.monotonic() + _START_SECONDS
        local_host = self._setup.local_host or _own_address(self._setup.master)
        setup = msgspec.structs.replace(
            self._setup, local_host=local_host, segment_bytes=segment_bytes
        )
        try:
            process = begun.result()
            try:
                process.connect(setup, deadline)
                if not segment_bytes:
                    self._share_more(process, deadline)
            except BaseException:
                process.end()  # nobody else will
                raise
            future.set_result(process)
        except Exception as error:  # noqa: BLE001 - raised where the process is wanted
            future.set_exception(error)


def _started(timeout_seconds: float) -> "Future[StoreProcess]":
    """A process that loads the library, in a moment."""
    future: Future[StoreProcess] = Future()

    def start() -> None:
        try:
            future.set_result(StoreProcess(timeout_seconds=timeout_seconds))
        except Exception as error:  # noqa: BLE001 - raised where the process is wanted
            future.set_exception(error)

    threading.Thread(target=start, daemon=True).start()
    return future


def _leave(future: "Future[StoreProcess]") -> None:
    if future.exception() is None:
        future.result().leave()


def _is_over(future: "Future[StoreProcess] | None") -> bool:
    if future is None:
        return True
    return future.done() and (future.exception() is not None or future.result().is_ended)


def _own_address(master: str) -> str:
    """The address of this machine that the master's machine sees."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()


def _copy(into: memoryview, of: memoryview) -> None:
    """Copy bytes without the interpreter's lock."""
    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(of, dtype=np.uint8))


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Buffers as bytes, without empty ones."""
    views = (memoryview(buffer) for buffer in buffers)
    return [view.cast("B") for view in views if view.nbytes]
