"""`EngineTier`: the objects of one rank and namespace as values in an engine that others run."""

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
from typing_extensions import override

from opal_connector.tiers import file_io
from opal_connector.tiers.base import ChecksumMismatchError, Rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.cpu_memory import allocate_host_rows
from opal_connector.tiers.engines.client import EngineClient, Span
from opal_connector.tiers.engines.names import PROBE_NAME, rank_prefix, value_key
from opal_connector.tiers.file_errors import (
    AbandonedError,
    NoSpaceError,
    ObjectGoneError,
    RefusedError,
)
from opal_connector.tiers.file_names import host_digits, object_key
from opal_connector.tiers.header_scan import batches
from opal_connector.tiers.keyed_tier import KeyedTier, always
from opal_connector.tiers.object_file import header_size, record_buffers
from opal_connector.tiers.record import (
    RecordHeader,
    encode_header,
    expected_checks,
    file_bytes,
    row_stride,
)
from opal_connector.transfers import ObjectName

_PROBE_BYTES: Final = 4096
_TAKEN_BACK_AT_ONCE: Final = 64
_TAKEN_BACK_BESIDE: Final = 8  # with a write that went well
_MOST_DOUBTFUL: Final = 4096
_HEADER_BYTES: Final = 64 << 10  # enough for over a thousand blocks
_COPIED_AT_ONCE_BYTES: Final = 1 << 20  # verified next: what a processor's cache still holds


class EngineTier(KeyedTier):
    """Objects as values, in the same form as files: a header that names them, then their rows.

    What the engine holds is found by listing and by asking, in the scheduler's process: `open` only
    makes sure that the engine answers. Writes whose end is unknown, because the engine did not
    answer, are taken back before the tier counts as well again.

    Mutable state: `_doubtful`, the keys of such writes, and `_leaving`, those of them that are just
    being removed, both guarded by `_lock`; a header buffer per thread. The thread that takes back
    holds `_taking_back`.
    """

    def __init__(self, name: str, client: EngineClient, *, row_bytes: int, rank: int) -> None:
        super().__init__(row_bytes=row_bytes, rank=rank)
        self.name = name  # type: ignore[misc] # one class for all engines
        self.client = client
        self._prefix = ""
        self._lock = threading.Lock()
        self._taking_back = threading.Lock()
        self._doubtful: set[str] = set()
        self._leaving: frozenset[str] = frozenset()
        self._of_thread = threading.local()

    @property
    @override
    def foreign_bytes(self) -> int:
        """0: an engine has a limit of its own."""
        return 0

    @override
    def open(self, namespace: bytes) -> Iterator[tuple[ObjectName, ...]]:
        """Make sure that the engine answers. Gives no page: what is there is found by asking."""
        self.attach(namespace)
        yield from ()

    @override
    def attach(self, namespace: bytes) -> None:
        self._namespace = namespace
        self._prefix = rank_prefix(namespace, self.rank)
        self.client.present([f"{self._prefix}{PROBE_NAME}"])

    @override
    def write_object(
        self,
        name: ObjectName,
        rows: Rows,
        tier_rows: Sequence[int],
        checks: Sequence[int],
        *,
        may_publish: Callable[[], bool] = always,
    ) -> int:
        header = encode_header(
            RecordHeader(self._namespace, self.rank, self.row_bytes, name, tuple(checks))
        )
        key = self._key(name)
        head = self._scratch(len(header))
        head[:] = header
        self.client.prepare(rows)
        if not may_publish():
            raise AbandonedError(key)
        with self._lock:
            if key in self._leaving:  # the removal may come after this write, and take it away
                raise RefusedError(key)
            self._doubtful.discard(key)  # this write decides
        try:
            self.client.put(key, record_buffers(head, rows, tier_rows))
        except NoSpaceError:
            raise
        except OSError:
            with self._lock:
                # Beyond that the circuit has long been open; what is left is whole and ours.
                if len(self._doubtful) < _MOST_DOUBTFUL:
                    self._doubtful.add(key)
            raise
        if self._doubtful:  # the engine answers again: soon, and never many at once
            with contextlib.suppress(OSError):
                self._take_back_some()
        return file_bytes(name.block_count, self.row_bytes, name.members)

    @override
    def read_object(
        self, name: ObjectName, positions: Sequence[int], into: Rows, into_rows: Sequence[int]
    ) -> list[int]:
        lent = self._lent(name, positions)
        if lent is not None:
            rows, checks = lent
            self._keep(name, positions, rows, checks, into, into_rows)
            return checks
        head = self._scratch(header_size(name))
        self.client.prepare(into)
        spans, paddings = _spans(head, name, positions, into, into_rows)
        size_bytes = file_bytes(name.block_count, self.row_bytes, name.members)
        self.client.get(self._key(name), size_bytes, spans)
        checks = self._checks(head, name, positions)
        if any(paddings):
            raise ChecksumMismatchError("there are bytes between the rows of a value")
        for position, row, check in zip(positions, into_rows, checks, strict=True):
            self._verify(into[row], name, position, check)
        return checks

    @override
    def lend_rows(self, name: ObjectName, positions: Sequence[int]) -> Rows | None:
        lent = self._lent(name, positions)
        if lent is None:
            return None
        rows, checks = lent
        for position, check in zip(positions, checks, strict=True):
            self._verify(rows[position], name, position, check)
        return rows

    @override
    def remove_object(self, name: ObjectName) -> None:
        key = self._key(name)
        with self._lock:
            was_doubtful = key in self._doubtful
            self._doubtful.discard(key)  # before: a write that fails meanwhile is a new doubt
        try:
            self.client.remove([key])
        except BaseException:
            with self._lock:
                if was_doubtful:
                    self._doubtful.add(key)
            raise

    @override
    def wipe(self) -> None:
        self.client.remove_under(self._prefix)
        self._take_back()

    @override
    def touch(self, keys: Sequence[bytes]) -> None:
        self.client.touch([value_key(self._prefix, key) for key in dict.fromkeys(keys)])

    @override
    def probe(self) -> None:
        self._take_back()
        key = f"{self._prefix}{PROBE_NAME}-{host_digits()}-{os.getpid()}"
        sent, received = os.urandom(_PROBE_BYTES), bytearray(_PROBE_BYTES)
        try:
            self.client.put(key, [sent])
            self.client.get(key, _PROBE_BYTES, [Span(0, [memoryview(received)])])
        except ObjectGoneError as error:
            raise OSError(errno.EIO, "the engine forgets what is written", key) from error
        finally:
            self.client.remove([key])
        if sent != received:
            raise OSError(errno.EIO, "the engine gives back other bytes", key)

    @override
    def close(self) -> None:
        self.client.close()

    # ---- inside ----

    def _key(self, name: ObjectName) -> str:
        return value_key(self._prefix, object_key(name))

    def _lent(self, name: ObjectName, positions: Sequence[int]) -> tuple[Rows, list[int]] | None:
        """Rows in the client's memory, up to the last of `positions`, and what these must verify.

        None where the client lends nothing. The header is verified, and what is between rows.
        """
        start, stride = header_size(name), row_stride(self.row_bytes)
        begins = [start + position * stride for position in sorted(positions)]
        wanted = [(0, start), *((begin, begin + stride) for begin in begins)]
        size_bytes = file_bytes(name.block_count, self.row_bytes, name.members)
        value = self.client.lend(self._key(name), size_bytes, wanted)
        if value is None:
            return None
        checks = self._checks(value[:start], name, positions)
        strides = np.frombuffer(value, np.uint8)[start:].reshape(-1, stride)
        if stride > self.row_bytes and strides[positions, self.row_bytes :].any():
            raise ChecksumMismatchError("there are bytes between the rows of a value")
        return strides[:, : self.row_bytes], checks

    def _keep(
        self,
        name: ObjectName,
        positions: Sequence[int],
        lent: Rows,
        checks: Sequence[int],
        into: Rows,
        into_rows: Sequence[int],
    ) -> None:
        """Copy lent rows to where they are to be, and verify them there, a little at a time."""
        most = max(1, _COPIED_AT_ONCE_BYTES // self.row_bytes)
        for begin, end in _adjacent_in_both(positions, into_rows, most):
            row, position = into_rows[begin], positions[begin]
            into[row : row + end - begin] = lent[position : position + end - begin]
            for index in range(begin, end):
                self._verify(into[into_rows[index]], name, positions[index], checks[index])

    def _checks(self, head: memoryview, name: ObjectName, positions: Sequence[int]) -> list[int]:
        """What rows of an object must verify, by its header; raises if that is not its header."""
        known = expected_checks(
            head,
            namespace=self._namespace,
            rank=self.rank,
            row_bytes=self.row_bytes,
            name=name,
        )
        return [known[position] for position in positions]

    def _verify(self, row: Rows, name: ObjectName, position: int, check: int) -> None:
        if row_check(row, name.stamps, position) != check:
            raise ChecksumMismatchError(f"row {position} of {self._key(name)} is damaged")

    def _take_back(self) -> None:
        """Remove what may have been written although nobody was told.

        Raises:
            OSError: The engine failed; what was removed by then is not tried again.
        """
        with self._taking_back:
            with self._lock:
                doubtful = list(self._doubtful)
            for batch in batches(doubtful, _TAKEN_BACK_AT_ONCE):
                self._remove_doubtful(batch)

    def _take_back_some(self) -> None:
        """The same for a few, unless another thread is at it."""
        if not self._taking_back.acquire(blocking=False):
            return
        try:
            with self._lock:
                doubtful = list(itertools.islice(self._doubtful, _TAKEN_BACK_BESIDE))
            self._remove_doubtful(doubtful)
        finally:
            self._taking_back.release()

    def _remove_doubtful(self, keys: Sequence[str]) -> None:
        """Remove those of the keys that are still in doubt; none is written meanwhile.

        They are in doubt no more from the beginning, so that a new doubt stays.
        """
        with self._lock:
            leaving = self._doubtful.intersection(keys)
            self._doubtful -= leaving
            self._leaving = frozenset(leaving)
        try:
            if leaving:
                self.client.remove(list(leaving))
        except BaseException:
            with self._lock:
                self._doubtful |= leaving
            raise
        finally:
            with self._lock:
                self._leaving = frozenset()

    def _scratch(self, size: int) -> memoryview:
        """A buffer of this thread, valid until its next call; always the same memory if it fits."""
        rows: Rows | None = getattr(self._of_thread, "header", None)
        if rows is None or rows.nbytes < size:
            rows = allocate_host_rows(row_count=1, row_bytes=max(size, _HEADER_BYTES))
            self._of_thread.header = rows
            self.client.prepare(rows)
        return memoryview(rows[0].data)[:size]


def _adjacent_in_both(
    positions: Sequence[int], rows: Sequence[int], most: int
) -> Iterator[tuple[int, int]]:
    """Slices, none longer than `most`, in which positions and rows each follow the one before."""
    for start, stop in file_io.adjacent_runs(positions):
        for first, last in file_io.adjacent_runs(rows[start:stop]):
            for begin in range(start + first, start + last, most):
                yield begin, min(begin + most, start + last)


def _spans(
    head: memoryview,
    name: ObjectName,
    positions: Sequence[int],
    into: Rows,
    into_rows: Sequence[int],
) -> tuple[list[Span], bytearray]:
    """What to read of a value: its header and these rows, adjoining ranges as one; and paddings.

    Rows that are not all full pages have padding between them, which must turn out to be zeros.
    """
    row_bytes = into.shape[1]
    stride = row_stride(row_bytes)
    gap = stride - row_bytes
    padding = bytearray(gap * len(positions))
    gaps = [memoryview(padding)[i * gap : (i + 1) * gap] for i in range(len(positions))]
    spans: list[Span] = []
    start_of_rows = header_size(name)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    for begin, end in file_io.adjacent_runs([positions[index] for index in order]):
        run = order[begin:end]
        buffers = file_io.row_buffers(
            into, [into_rows[index] for index in run], [gaps[index] for index in run] if gap else []
        )
        offset = start_of_rows + positions[run[0]] * stride
        spans.append(Span(offset, [memoryview(buffer).cast("B") for buffer in buffers]))
    if spans and spans[0].offset == start_of_rows:
        spans[0] = Span(0, [head, *spans[0].buffers])
    else:
        spans.insert(0, Span(0, [head]))
    return spans, padding
