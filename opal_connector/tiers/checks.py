"""The check value of a row: over its bytes, seeded with the hash of the block that it holds.

The same value stands beside a row in memory and in the header of a file, so that a row is read
and checked in one tier and kept in another without being hashed twice.
"""

from xxhash import xxh3_64

from opal_connector.keys import HASH_BYTES
from opal_connector.tiers.base import ChecksumMismatchError, Rows

EMPTY = 0  # the check value of a row that holds nothing
# xxhash gives up the GIL for larger pieces, and getting it back from a busy engine loop costs up
# to a switch interval (5 ms) each time: far more than the hashing.
_PIECE_BYTES = 64 << 10


def row_check(row: Rows, stamps: bytes, position: int) -> int:
    """The check value of `row` as block `position` of an object with these stamps; never EMPTY."""
    start = position * HASH_BYTES
    digest = xxh3_64(seed=int.from_bytes(stamps[start : start + 8], "little"))
    update = digest.update
    data = row.data  # a view of the bytes, not a copy
    for offset in range(0, len(data), _PIECE_BYTES):
        update(data[offset : offset + _PIECE_BYTES])
    return digest.intdigest() or 1


def verify_row(row: Rows, stamps: bytes, position: int, expected: int, place: str) -> None:
    """Compare a row with its check value.

    Raises:
        ChecksumMismatchError: The bytes are not those that the value was made of.
    """
    if expected != row_check(row, stamps, position):
        raise ChecksumMismatchError(place)
