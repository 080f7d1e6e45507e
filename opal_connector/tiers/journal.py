"""The index of a directory: its objects in the order of their use, as a log that is appended to.

The files are the truth; the index spares reading their headers at a start and remembers the order
of use. It begins with a snapshot and goes on with what happened since. Every frame has a checksum;
what follows the first bad one is not read. So a crash loses at most what was not written yet.
"""

import contextlib
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from opal_connector.tiers import file_io
from opal_connector.tiers.file_names import INDEX_NAME, new_temporary_name, object_key
from opal_connector.transfers import ObjectName

PAGE_NAMES: Final = 512
FLUSH_SECONDS: Final = 1.0
_FLUSH_ENTRIES: Final = 1024
_SLACK_BYTES: Final = 1 << 20
_COMPACT_FACTOR: Final = 3  # the log may be so many times as long as what lives in it
_FRAME: Final = struct.Struct("<II")
_VERSION: Final = 1
_APPEND: Final = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class IndexOwner(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """What an index belongs to. The first record; another owner's index says nothing here."""

    namespace: bytes
    rank: int
    row_bytes: int
    version: int = _VERSION


class Put(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Objects that were written, the most recent last."""

    names: list[ObjectName]


class Delete(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Keys of objects that were removed."""

    keys: list[bytes]


class Touch(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Keys of objects that were used, the most recent last."""

    keys: list[bytes]


Entry = Put | Delete | Touch
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(IndexOwner | Put | Delete | Touch).decode


class LoadedIndex(msgspec.Struct):
    """What an index file says. `valid_bytes` is where its first bad frame begins, or its end."""

    names: dict[bytes, ObjectName] = {}
    valid_bytes: int = 0
    size_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the file was there and every frame in it was good."""
        return 0 < self.valid_bytes == self.size_bytes


def load_index(directory: str, owner: IndexOwner) -> LoadedIndex:
    """Read the index of a directory, the least recently used first. Blocks; damage ends it early.

    Raises:
        OSError: The file is there and cannot be read.
    """
    loaded = LoadedIndex()
    try:
        with open(f"{directory}/{INDEX_NAME}", "rb") as file:
            data = memoryview(file.read())
    except FileNotFoundError:
        return loaded
    loaded.size_bytes = len(data)
    offset = 0
    while (frame := _frame_at(data, offset)) is not None:
        if (offset == 0) != isinstance(frame, IndexOwner):
            break
        if isinstance(frame, IndexOwner):
            if frame != owner:
                break
        else:
            _apply(loaded.names, frame)
        offset += _FRAME.size + _FRAME.unpack_from(data, offset)[0]
        loaded.valid_bytes = offset
    return loaded


def _frame_at(data: memoryview, offset: int) -> IndexOwner | Entry | None:
    """The record at `offset`; None at the end, and for anything that is no whole record."""
    if len(data) < offset + _FRAME.size:
        return None
    size, checksum = _FRAME.unpack_from(data, offset)
    payload = data[offset + _FRAME.size : offset + _FRAME.size + size]
    if len(payload) < size or zlib.crc32(payload) != checksum:
        return None
    try:
        record: IndexOwner | Entry = _decode(payload)
    except msgspec.DecodeError:
        return None  # written by another version: the files tell the rest
    return record


def _apply(names: dict[bytes, ObjectName], entry: Entry) -> None:
    """Bring `names`, the least recently used first, forward by one record."""
    match entry:
        case Put(put):
            for name in put:
                key = object_key(name)
                names.pop(key, None)
                names[key] = name
        case Delete(keys):
            for key in keys:
                names.pop(key, None)
        case Touch(keys):
            for key in keys:
                if (touched := names.pop(key, None)) is not None:
                    names[key] = touched


class Journal:
    """Appends to the index of one directory, and rewrites it when it has grown too long.

    Mutable state: the entries not yet written, the file, its length and the length at which it is
    rewritten; guarded by `_lock`, which is held while the index is written. A failure to write is
    no failure of the caller: the entries are dropped, and the next start reads headers instead.
    """

    def __init__(
        self, directory: str, owner: IndexOwner, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._owner = owner
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: list[Entry] = []
        self._pending_count = 0
        self._flushed_at = clock()
        self._file = -1
        self._file_bytes = 0
        self._limit_bytes = 0

    def resume(self, loaded: LoadedIndex, *, is_exact: bool) -> None:
        """Go on behind what was loaded, or begin anew. Blocks.

        `is_exact` says that the file has just these names; else it is written again.
        """
        with self._lock:
            sample = next(iter(loaded.names.values()), None)
            name_bytes = 0 if sample is None else len(_encode(sample))
            self._file_bytes = loaded.valid_bytes
            self._limit_bytes = _limit(len(loaded.names) * name_bytes)
            if not (is_exact and loaded.is_whole) or self._file_bytes > self._limit_bytes:
                self._rewrite(loaded.names.values())
                return
            with contextlib.suppress(OSError):  # without it nothing is remembered
                self._file = os.open(f"{self._directory}/{INDEX_NAME}", _APPEND)

    def put(self, name: ObjectName) -> None:
        """An object was written. Blocks at most for a flush."""
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Put) and len(last.names) < PAGE_NAMES:
                last.names.append(name)
            else:
                self._pending.append(Put([name]))
            self._added(1)

    def delete(self, key: bytes) -> None:
        """An object was removed. Blocks at most for a flush."""
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Delete):
                last.keys.append(key)
            else:
                self._pending.append(Delete([key]))
            self._added(1)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Objects were used, the most recent last. Blocks at most for a flush."""
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if isinstance(last, Touch):
                last.keys.extend(keys)
            else:
                self._pending.append(Touch(list(keys)))
            self._added(len(keys))

    def flush(self) -> None:
        """Write what is pending. Blocks."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write what is pending and give up the file. Blocks. No call follows."""
        with self._lock:
            self._flush()
            self._give_up_file()

    def _added(self, count: int) -> None:
        self._pending_count += count
        is_due = self._clock() - self._flushed_at >= FLUSH_SECONDS
        if is_due or self._pending_count >= _FLUSH_ENTRIES:
            self._flush()

    def _flush(self) -> None:
        frames = b"".join(_frame(entry) for entry in self._pending)
        self._pending.clear()
        self._pending_count = 0
        self._flushed_at = self._clock()
        if not frames or self._file < 0:
            return
        try:
            file_io.write_fully(self._file, [frames], self._file_bytes)
        except OSError:
            return  # the next frame goes where this one should have gone
        self._file_bytes += len(frames)
        if self._file_bytes > self._limit_bytes:
            self._compact()

    def _compact(self) -> None:
        # From the file: a second copy of all names in memory would cost more than reading them
        # now and then.
        try:
            loaded = load_index(self._directory, self._owner)
        except OSError:
            self._limit_bytes = _limit(self._file_bytes)  # not again with the next entry
            return
        self._rewrite(loaded.names.values())

    def _rewrite(self, names: Iterable[ObjectName]) -> None:
        """Put a fresh index in the place of the old one, if the medium lets us."""
        temporary = f"{self._directory}/{new_temporary_name()}"
        ordered = list(names)
        pages = [
            _frame(Put(ordered[start : start + PAGE_NAMES]))
            for start in range(0, len(ordered), PAGE_NAMES)
        ]
        frames = [_frame(self._owner), *pages]
        try:
            file = file_io.create(temporary, direct=False)
            try:
                file_io.write_fully(file, frames, 0)
                os.rename(temporary, f"{self._directory}/{INDEX_NAME}")
            except OSError:
                os.close(file)
                raise
        except OSError:
            # The old index may stay: whatever it says is compared with the files.
            self._limit_bytes = _limit(self._file_bytes)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            return
        self._give_up_file()
        self._file = file
        self._file_bytes = sum(map(len, frames))
        self._limit_bytes = _limit(self._file_bytes)

    def _give_up_file(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            with contextlib.suppress(OSError):  # nothing of ours depends on the last bytes
                os.close(file)


def _limit(fresh_bytes: int) -> int:
    """How long the log may grow that was so long when it was fresh."""
    return _COMPACT_FACTOR * fresh_bytes + _SLACK_BYTES


def _frame(record: IndexOwner | Entry) -> bytes:
    payload = _encode(record)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
