"""Which ranges of an object to ask for, and where their bytes go."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from typing_extensions import Buffer

from opal_connector.tiers.base import ChecksumMismatchError, Rows
from opal_connector.tiers.engines.client import Span

# Bytes between two ranges that are read along: a request takes as long as a megabyte.
_GAP_BYTES_MAX: Final = 1 << 20
# A request that takes so long has spent little of it on its round trip.
_PART_SECONDS: Final = 0.1
_MEASURED_BYTES_MIN: Final = 1 << 20
_NEW_SHARE: Final = 0.25


def ranges_of(wanted: Iterable[tuple[int, int]], part_bytes: int) -> list[tuple[int, int]]:
    """The ranges, begin and end, that these are asked for by; none is longer than a part.

    What lies close to each other shares a request; a long one is split into equal parts.
    """
    joined: list[tuple[int, int]] = []
    for begin, end in wanted:
        if begin == end:
            continue
        if joined and begin - joined[-1][1] <= _GAP_BYTES_MAX:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return [part for begin, end in joined for part in _split(begin, end, part_bytes)]


def _split(begin: int, end: int, part_bytes: int) -> list[tuple[int, int]]:
    count = -(-(end - begin) // part_bytes)
    edges = [begin + (end - begin) * index // count for index in range(count + 1)]
    return list(itertools.pairwise(edges))


class Pace:
    """How much of a value one request should bring, from what requests brought before.

    One connection to a cloud's store is slow, and several at once are fast together. Where one is
    fast already, in a rack or on this host, splitting a value only costs both sides work.

    Mutable state: bytes per second of one request, smoothed; a hint that any thread writes whole.
    """

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._bytes_per_second = 0.0

    @property
    def part_bytes(self) -> int:
        """What a request should bring at most: never less than a part."""
        return max(self._part_bytes, int(self._bytes_per_second * _PART_SECONDS))

    def note(self, size_bytes: int, seconds: float) -> None:
        """A request brought so much in that time."""
        if size_bytes >= _MEASURED_BYTES_MIN and seconds > 0:
            rate = size_bytes / seconds
            known = self._bytes_per_second or rate
            self._bytes_per_second = known + _NEW_SHARE * (rate - known)


class Destination:
    """The buffers of spans, found by the offset in the value that they are filled from."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._begins: list[int] = []
        self._buffers: list[Rows] = []
        for span in spans:
            offset = span.offset
            for buffer in span.buffers:
                self._begins.append(offset)
                self._buffers.append(np.frombuffer(buffer, np.uint8))
                offset += buffer.nbytes

    def fill(self, offset: int, end: int, data: Buffer) -> None:
        """Copy what was read from `offset` to `end` to where it belongs.

        Raises:
            ChecksumMismatchError: These are not so many bytes.
        """
        source = np.frombuffer(memoryview(data), np.uint8)
        if source.nbytes != end - offset:
            raise ChecksumMismatchError(f"a range of {end - offset} bytes has {source.nbytes}")
        index = max(0, bisect_right(self._begins, offset) - 1)
        while index < len(self._begins) and self._begins[index] < end:
            begin, buffer = self._begins[index], self._buffers[index]
            first, last = max(begin, offset), min(begin + buffer.nbytes, end)
            if first < last:
                buffer[first - begin : last - begin] = source[first - offset : last - offset]
            index += 1
