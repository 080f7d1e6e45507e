"""The calls of a client on Mooncake's library, in the process that has it."""

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opal_connector.mooncake_helper.messages import (
    ALREADY_THERE,
    BROKEN,
    NO_SPACE,
    NOT_FOUND,
    NOT_READY,
    OTHER_SIZE,
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
)

# A full store evicts when somebody asks for space, a few milliseconds later.
_SPACE_SECONDS: Final = 0.25
# Whoever else writes the same value has ended by then, or is gone.
_OTHER_WRITER_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.005
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Memories:
    """The memory that both processes map, by its number, and where it begins here.

    Mutable state: `_starts`, changed by one thread. No call names memory that was removed.
    """

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}

    def add(self, memory: int, address: int) -> None:
        """It begins at `address` in this process."""
        self._starts[memory] = address

    def remove(self, memory: int) -> int:
        """Nothing is there any more; gives where it began."""
        return self._starts.pop(memory)

    def start(self, memory: int) -> int:
        """Where it begins in this process."""
        return self._starts[memory]

    def addresses(self, pieces: Sequence[Piece]) -> list[int]:
        """Where pieces begin in this process."""
        return [self._starts[piece.memory] + piece.offset for piece in pieces]


class StoreCalls:
    """Carries out calls, one after the other in a thread, many threads at once.

    Mutable state: `_being_put`, the keys of puts under way here, guarded by `_turn`: the library
    knows a put by its key alone.
    """

    def __init__(self, store: Any, config: Any, memories: Memories) -> None:
        self._store = store
        self._config = config
        self._memories = memories
        self._turn = threading.Condition()
        self._being_put: set[str] = set()

    def carry_out(self, call: Call) -> Answer:
        """The answer to a call. Raises nothing of the library."""
        try:
            return self._carry_out(call)
        except Exception as error:  # noqa: BLE001 - said to whoever called
            return Answer([BROKEN], f"{type(error).__name__}: {error}")

    def _carry_out(self, call: Call) -> Answer:
        match call:
            case Put(key=key, pieces=pieces, seconds=seconds):
                deadline = time.monotonic() + seconds
                with self._alone(key, deadline):
                    return Answer([self._put(key, pieces, deadline)])
            case Get(key=key, size_bytes=size_bytes, parts=parts):
                return Answer([self._get(key, size_bytes, parts)])
            case GetStart(key=key, piece=piece):
                return Answer([self._get_start(key, piece)])
            case Present(keys=keys):
                return Answer(self._store.batch_is_exist(keys))
            case Remove(keys=keys):
                return Answer(self._store.batch_remove(keys, True))
            case RemoveMatching(pattern=pattern):
                return Answer([min(0, self._store.remove_by_regex(pattern, True))])

    # ---- put ----

    @contextmanager
    def _alone(self, key: str, deadline: float) -> Iterator[None]:
        with self._turn:
            left_seconds = max(0.0, deadline - time.monotonic())
            if not self._turn.wait_for(lambda: key not in self._being_put, left_seconds):
                raise TimeoutError("another put of this key is still under way")
            self._being_put.add(key)
        try:
            yield
        finally:
            with self._turn:
                self._being_put.remove(key)
                self._turn.notify_all()

    def _put(self, key: str, pieces: Sequence[Piece], deadline: float) -> int:
        """Store a value; one that is there already is replaced, unless it is the same."""
        size_bytes = sum(piece.size_bytes for piece in pieces)
        now = time.monotonic()
        limits: Mapping[int, float] = {
            NO_SPACE: min(deadline, now + _SPACE_SECONDS),
            ALREADY_THERE: min(deadline, now + _OTHER_WRITER_SECONDS),
        }
        while True:
            code: int = self._store.batch_put_session_start([key], [size_bytes], self._config)[0]
            if code == 0:
                return self._fill(key, pieces, size_bytes)
            if code not in limits:
                return code
            limit = limits[code]
            if code == ALREADY_THERE:
                if self._has_same(key, pieces, size_bytes):
                    return 0
                removed: int = self._store.batch_remove([key], True)[0]
                if removed not in (0, NOT_FOUND, NOT_READY):
                    return removed
                # One that somebody is writing right now cannot be removed: wait for him, not for
                # ever. One that was removed leaves its place to this one, however long that took.
                limit = limit if removed == NOT_READY else deadline
            if time.monotonic() >= limit:
                return code
            time.sleep(_PAUSE_SECONDS)

    def _fill(self, key: str, pieces: Sequence[Piece], size_bytes: int) -> int:
        """Write a value that space was found for, and let others see it, or give the space up."""
        offsets, position = [], 0
        for piece in pieces:
            offsets.append(position)
            position += piece.size_bytes
        code: int = BROKEN
        try:
            code = self._store.batch_put_from_multi_buffer_ranges(
                [key],
                [self._memories.addresses(pieces)],
                [[piece.size_bytes for piece in pieces]],
                [offsets],
            )[0]
        finally:
            if code != size_bytes:
                self._store.batch_put_session_revoke([key])
        if code != size_bytes:
            return BROKEN if code >= 0 else code
        ended: int = self._store.batch_put_session_end([key])[0]
        return ended

    def _has_same(self, key: str, pieces: Sequence[Piece], size_bytes: int) -> bool:
        """Whether the value that is there is this one. False too if that cannot be found out."""
        if self._store.get_size(key) != size_bytes:
            return False
        found = self._store.get_buffer(key)  # in memory of the library's own
        if found is None or found.size() != size_bytes:
            return False
        position = found.ptr()
        for piece, address in zip(pieces, self._memories.addresses(pieces), strict=True):
            if _compare(address, position, piece.size_bytes) != 0:
                return False
            position += piece.size_bytes
        return True

    # ---- get ----

    def _get(self, key: str, size_bytes: int, parts: Sequence[Part]) -> int:
        wanted = sum(piece.size_bytes for part in parts for piece in part.pieces)
        if wanted == size_bytes:
            pieces = [piece for part in parts for piece in part.pieces]
            code: int = self._store.batch_get_into_multi_buffers(
                [key],
                [self._memories.addresses(pieces)],
                [[piece.size_bytes for piece in pieces]],
            )[0]
            if code == wanted or code in (NOT_FOUND, NOT_READY):
                return code
            size: int = self._store.get_size(key)
            return _of_size(size, size_bytes, BROKEN if code >= 0 else code)
        code = _of_size(self._store.get_size(key), size_bytes, 0)
        return code or self._get_ranges(key, parts)

    def _get_start(self, key: str, piece: Piece) -> int:
        size: int = self._store.get_size(key)
        if size <= 0:
            return size
        wanted = Piece(piece.memory, piece.offset, min(size, piece.size_bytes))
        return self._get_ranges(key, [Part(0, [wanted])])

    def _get_ranges(self, key: str, parts: Sequence[Part]) -> int:
        """Fill parts of a value; gives how many bytes, or the first failure."""
        fragments: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for part in parts:
            position = part.offset
            for piece in part.pieces:
                into, of, sizes = fragments.setdefault(piece.memory, ([], [], []))
                into.append(piece.offset)
                of.append(position)
                sizes.append(piece.size_bytes)
                position += piece.size_bytes
        starts = [self._memories.start(memory) for memory in fragments]
        answers = self._store.get_into_ranges(
            starts,
            [[key]] * len(starts),
            [[into] for into, _, _ in fragments.values()],
            [[of] for _, of, _ in fragments.values()],
            [[sizes] for _, _, sizes in fragments.values()],
        )
        total = 0
        for (_, _, sizes), answer in zip(fragments.values(), answers, strict=True):
            for size, code in zip(sizes, answer[0], strict=True):
                if code != size:
                    return int(code) if code < 0 else BROKEN
                total += size
        return total


def _of_size(size: int, expected: int, code: int) -> int:
    """`code`, unless the size of a value, or the failure to tell it, says more."""
    if size < 0:
        return size
    return code if size == expected else OTHER_SIZE
