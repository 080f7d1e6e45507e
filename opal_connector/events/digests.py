"""Fingerprints of sets of blocks: two who hold the same blocks hold the same 2 KiB.

A block falls into the bucket of its hash's first byte; a bucket is the XOR of the first eight bytes
of its hashes as little-endian integers.
"""

from collections.abc import Sequence
from typing import Final

import numpy

from opal_connector.events.channel import BUCKET_COUNT

HASH_BYTES: Final = 32
_FOLD_AT: Final = 4_096  # hashes that are kept to be folded in one go


class BucketDigests:
    """The fingerprint of one set of blocks, kept up to date change by change.

    Mutable state: the buckets, and the hashes changed since they were last folded in, which are
    bounded. Not thread-safe; its owner guards it.
    """

    def __init__(self) -> None:
        self._buckets = numpy.zeros(BUCKET_COUNT, dtype="<u8")
        self._changed: list[bytes] = []
        self._changed_blocks = 0

    def flip(self, run: bytes) -> None:
        """Add or remove the blocks of a run, their hashes one after the other.

        Whoever calls knows that each of them was absent and is present now, or the reverse.
        """
        self._changed.append(run)
        self._changed_blocks += len(run) // HASH_BYTES
        if self._changed_blocks >= _FOLD_AT:
            self._fold()

    def flip_all(self, hashes: Sequence[bytes]) -> None:
        """Add or remove blocks, as `flip`."""
        self.flip(b"".join(hashes))

    def buckets(self) -> bytes:
        """The fingerprint: all buckets as little-endian integers."""
        self._fold()
        return self._buckets.tobytes()

    def clear(self) -> None:
        """Forget all blocks."""
        self._buckets[:] = 0
        self._changed.clear()
        self._changed_blocks = 0

    def _fold(self) -> None:
        if not self._changed:
            return
        hashes = numpy.frombuffer(b"".join(self._changed), dtype="<u8").reshape(-1, HASH_BYTES // 8)
        heads = hashes[:, 0]
        numpy.bitwise_xor.at(self._buckets, (heads & 0xFF).astype(numpy.intp), heads)
        self._changed.clear()
        self._changed_blocks = 0


def differing(a: bytes, b: bytes) -> bytes:
    """The numbers of the buckets in which two fingerprints differ, one byte each."""
    ours, theirs = (numpy.frombuffer(buckets, dtype="<u8") for buckets in (a, b))
    return numpy.flatnonzero(ours != theirs).astype(numpy.uint8).tobytes()
