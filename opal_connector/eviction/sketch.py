"""How often keys were seen lately, approximately."""

import struct
import zlib

from opal_connector.eviction.base import Key

_MOST = 15  # four bits
_HALF = bytes(value // 2 for value in range(256))
_WINDOW = 10  # accesses per counter and halving
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_words = struct.Struct("<2Q").unpack_from


def key_hash(key: Key) -> int:
    """64 bits from a key's own value: the same in every process, unlike `hash`."""
    if isinstance(key, int):
        mixed = (key * _MIX) & _MASK
        return ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
    text = key if isinstance(key, bytes) else repr(key).encode()
    return (zlib.crc32(text) * _MIX) & _MASK


def two_hashes(key: Key) -> tuple[int, int]:
    """Two numbers from the value of a key that is no digest."""
    mixed = key_hash(key)
    return mixed, mixed >> 22


class FrequencySketch:
    """A count-min sketch of two rows whose counters are halved from time to time.

    As in "TinyLFU: a highly efficient cache admission policy", Einziger, Friedman and Manes, ACM
    Transactions on Storage 13 (2017): a count is the least of a key's counters, and after ten
    accesses per key of the capacity all counters are halved, so that old accesses fade. Only
    the smaller of a key's two counters is raised, both if they are equal ("minimal increment"):
    two rows of two counters per key then do what four of one do, in half the time.

    A key of bytes (sixteen at least) is a digest: its first two words serve as hashes.

    Mutable state: `_first` and `_second` (the rows), `_mask` (a row's length less one) and `_left`
    (accesses until the next halving).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = 64  # keys for which the rows are long enough
        while self.capacity < capacity:
            self.capacity *= 2
        self._first = bytearray(2 * self.capacity)
        self._second = bytearray(2 * self.capacity)
        self._mask = 2 * self.capacity - 1
        self._left = _WINDOW * self.capacity

    def add(self, key: Key) -> None:
        """Count an access."""
        one, other = _words(key) if type(key) is bytes else two_hashes(key)
        one &= self._mask
        other &= self._mask
        count, other_count = self._first[one], self._second[other]
        if count < other_count:
            self._first[one] = count + 1
        elif other_count < count:
            self._second[other] = other_count + 1
        elif count < _MOST:
            self._first[one] = self._second[other] = count + 1
        self._left -= 1
        if not self._left:
            self._left = _WINDOW * self.capacity // 2
            self._first = self._first.translate(_HALF)
            self._second = self._second.translate(_HALF)

    def count(self, key: Key) -> int:
        """Accesses lately, never too few but for the halving."""
        one, other = _words(key) if type(key) is bytes else two_hashes(key)
        count: int = self._first[one & self._mask]
        other_count: int = self._second[other & self._mask]
        return count if count < other_count else other_count
