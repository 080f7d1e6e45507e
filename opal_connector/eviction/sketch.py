"""How often keys were seen lately, approximately."""

import struct
import zlib

from opal_connector.eviction.base import Key

_MOST = 15  # four bits
_HALF = bytes(value // 2 for value in range(256))
_WINDOW = 10  # accesses per counter and halving
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FOUR = struct.Struct("<4I")


def key_hash(key: Key) -> int:
    """64 bits from a key's own value: the same in every process, unlike `hash`."""
    if isinstance(key, int):
        mixed = (key * _MIX) & _MASK
        return ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    text = key if isinstance(key, bytes) else repr(key).encode()
    return (zlib.crc32(text) * _MIX) & _MASK


def four_hashes(key: Key) -> tuple[int, int, int, int]:
    """Four numbers of a key for rows of up to 2**32 counters, from its own value.

    A key of bytes is a digest, any four bytes of which are as good as a hash.
    """
    if type(key) is bytes and len(key) >= _FOUR.size:
        return _FOUR.unpack_from(key)  # type: ignore[return-value]
    mixed = key_hash(key)
    return mixed, mixed >> 11, mixed >> 22, mixed >> 33


class FrequencySketch:
    """A count-min sketch of four rows whose counters are halved from time to time.

    As in "TinyLFU: a highly efficient cache admission policy", Einziger, Friedman and Manes, ACM
    Transactions on Storage 13 (2017): a count is the least of a key's counters, and after ten
    accesses per key of the capacity all counters are halved, so that old accesses fade.

    Mutable state: `_counters` (the rows, one behind the other), `_mask` (a row's length less one)
    and `_added` since the last halving.
    """

    def __init__(self, capacity: int) -> None:
        width = 64
        while width < capacity:
            width *= 2
        self._counters = bytearray(4 * width)
        self._mask = width - 1
        self._added = 0

    @property
    def capacity(self) -> int:
        """Keys for which the rows are long enough."""
        return self._mask + 1

    def add(self, key: Key) -> None:
        """Count an access."""
        first, second, third, fourth = four_hashes(key)
        counters, mask = self._counters, self._mask
        width = mask + 1
        # Written out: a loop over the rows costs as much again.
        if counters[place := first & mask] < _MOST:
            counters[place] += 1
        if counters[place := (second & mask) + width] < _MOST:
            counters[place] += 1
        if counters[place := (third & mask) + 2 * width] < _MOST:
            counters[place] += 1
        if counters[place := (fourth & mask) + 3 * width] < _MOST:
            counters[place] += 1
        self._added += 1
        if self._added >= _WINDOW * width:
            self._added //= 2
            self._counters = counters.translate(_HALF)

    def count(self, key: Key) -> int:
        """Accesses lately, never too few but for the halving."""
        first, second, third, fourth = four_hashes(key)
        counters, mask = self._counters, self._mask
        width = mask + 1
        return min(
            counters[first & mask],
            counters[(second & mask) + width],
            counters[(third & mask) + 2 * width],
            counters[(fourth & mask) + 3 * width],
        )
