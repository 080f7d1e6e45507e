"""How often keys were seen lately, approximately."""

import zlib

from opal_connector.eviction.base import Key

_MOST = 15  # four bits
_HALF = bytes(value // 2 for value in range(256))
_WINDOW = 10  # accesses per counter and halving
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def key_hash(key: Key) -> int:
    """64 bits from a key's own value: the same in every process, unlike `hash`."""
    if type(key) is bytes:
        return (zlib.crc32(key) * _MIX) & _MASK
    if isinstance(key, int):
        mixed = (key * _MIX) & _MASK
        return ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    return (zlib.crc32(repr(key).encode()) * _MIX) & _MASK


class FrequencySketch:
    """A count-min sketch of four rows whose counters are halved from time to time.

    As in "TinyLFU: a highly efficient cache admission policy", Einziger, Friedman and Manes, ACM
    Transactions on Storage 13 (2017): a count is the least of a key's counters, and after ten
    accesses per key of the capacity all counters are halved, so that old accesses fade.

    Mutable state: `_rows`, `_mask` (a row's length less one) and `_added` since the last halving.
    """

    def __init__(self, capacity: int) -> None:
        width = 64
        while width < capacity:
            width *= 2
        self._rows = [bytearray(width) for _ in range(4)]
        self._mask = width - 1
        self._added = 0

    @property
    def capacity(self) -> int:
        """Keys for which the rows are long enough."""
        return self._mask + 1

    def add(self, key: Key) -> None:
        """Count an access."""
        mixed, mask = key_hash(key), self._mask
        for row in self._rows:
            place = mixed & mask
            if row[place] < _MOST:
                row[place] += 1
            mixed >>= 11
        self._added += 1
        if self._added >= _WINDOW * (mask + 1):
            self._added //= 2
            for row in self._rows:
                row[:] = row.translate(_HALF)

    def count(self, key: Key) -> int:
        """Accesses lately, never too few but for the halving."""
        mixed, mask = key_hash(key), self._mask
        first, second, third, fourth = self._rows
        return min(
            first[mixed & mask],
            second[(mixed >> 11) & mask],
            third[(mixed >> 22) & mask],
            fourth[(mixed >> 33) & mask],
        )
