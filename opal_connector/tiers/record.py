"""The format of an object's file: a header that names the object completely, then its rows.

    magic, version, kv group, rank, sizes, token digest, namespace, parent hash,
    the hash of every block (the run), the check value of every row, zeros, header checksum

An object of several kv groups has as many rows for every block; the size of the payload tells.

The header fills a multiple of 4096 bytes, its checksum being the last eight. Row `i` of the payload
begins at `header_bytes + i * row_stride`, also a multiple of 4096; what a row does not fill is
zero. All numbers are little-endian. A name in the filesystem promises nothing: a reader compares
every field of the header with what it wants before it uses a byte of the payload.
"""

import struct
from typing import Final

import msgspec
from typing_extensions import Buffer
from xxhash import xxh3_64_intdigest

from opal_connector.keys import HASH_BYTES
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.transfers import ObjectName

MAGIC: Final = b"OPALKV\x1a\n"
VERSION: Final = 1
ALIGNMENT: Final = 4096
MAX_BLOCKS: Final = 1 << 16  # no header makes a reader ask for more than some megabytes
_FIXED: Final = struct.Struct("<8sHHIIIQQQQ32s32s")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECK_BYTES: Final = 8


class RecordHeader(msgspec.Struct, frozen=True, gc=False):
    """What the header of a file says. `checks[i]` is the check value of row `i`."""

    namespace: bytes
    rank: int
    row_bytes: int
    name: ObjectName
    checks: tuple[int, ...]

    @property
    def row_count(self) -> int:
        """Rows in the payload."""
        return len(self.checks)


def row_stride(row_bytes: int) -> int:
    """Bytes from one row of a payload to the next."""
    return _round_up(row_bytes)


def header_bytes(block_count: int, members: int = 1) -> int:
    """Bytes of the header of an object of so many blocks, a multiple of 4096."""
    per_block = HASH_BYTES + members * _CHECK_BYTES
    return _round_up(_FIXED.size + block_count * per_block + _CHECKSUM.size)


def file_bytes(block_count: int, row_bytes: int, members: int = 1) -> int:
    """The exact size of an object's file, a multiple of 4096."""
    payload_bytes = block_count * members * row_stride(row_bytes)
    return header_bytes(block_count, members) + payload_bytes


def encode_header(header: RecordHeader) -> bytes:
    """The bytes of a header.

    Raises:
        ValueError: A hash has the wrong length, or the run and the checks do not fit together.
    """
    name, count = header.name, header.row_count
    if not 0 < count <= MAX_BLOCKS or len(name.run) * name.members != count * HASH_BYTES:
        raise ValueError(f"a run of {len(name.run)} bytes does not have {count} blocks")
    if len(header.namespace) != HASH_BYTES or len(name.parent_hash) != HASH_BYTES:
        raise ValueError(f"a namespace and a parent hash have {HASH_BYTES} bytes")
    start = _start(header.namespace, header.rank, header.row_bytes, name)
    checks = struct.pack(f"<{count}Q", *header.checks)
    size = header_bytes(name.block_count, name.members)
    body = (start + checks).ljust(size - _CHECKSUM.size, b"\0")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def _start(namespace: bytes, rank: int, row_bytes: int, name: ObjectName) -> bytes:
    """All of a header up to its check values: what identifies the object, and nothing else."""
    count, stride = name.block_count, row_stride(row_bytes)
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        name.group,
        rank,
        header_bytes(count, name.members),
        count,
        row_bytes,
        stride,
        name.row_count * stride,
        xxh3_64_intdigest(name.run),
        namespace,
        name.parent_hash,
    )
    return fixed + name.run


def announced_header_bytes(start: Buffer) -> int:
    """How many bytes the header has that begins with `start`, at least 4096 bytes or all there is.

    Raises:
        ChecksumMismatchError: It is no header of ours.
    """
    data = memoryview(start)
    if len(data) < _FIXED.size:
        raise ChecksumMismatchError("a file is too short for a header")
    magic, version, _, _, size, count, _, stride, payload, *_ = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ChecksumMismatchError("a file does not begin as an object does")
    if version != VERSION:
        raise ChecksumMismatchError(f"a file has format version {version}, not {VERSION}")
    members = _members(count, stride, payload)
    if not 0 < count * members <= MAX_BLOCKS or size != header_bytes(count, members):
        raise ChecksumMismatchError(f"a header of {size} bytes cannot name {count} blocks")
    return int(size)


def parse_header(data: Buffer) -> RecordHeader:
    """The header at the beginning of `data`.

    Raises:
        ChecksumMismatchError: It is no whole and undamaged header of ours.
    """
    view = memoryview(data)
    size = announced_header_bytes(view)
    if len(view) < size:
        raise ChecksumMismatchError(f"a header of {size} bytes ends after {len(view)}")
    (checksum,) = _CHECKSUM.unpack_from(view, size - _CHECKSUM.size)
    if checksum != xxh3_64_intdigest(view[: size - _CHECKSUM.size]):
        raise ChecksumMismatchError("the checksum of a header is wrong")
    fields = _FIXED.unpack_from(view)
    group, rank, _, count, row_bytes, stride, payload, digest, namespace, parent = fields[2:]
    members = _members(count, stride, payload)
    run_end = _FIXED.size + count * HASH_BYTES
    run = bytes(view[_FIXED.size : run_end])
    if stride != row_stride(row_bytes) or payload != count * members * stride:
        raise ChecksumMismatchError("the sizes in a header contradict each other")
    if digest != xxh3_64_intdigest(run):
        raise ChecksumMismatchError("the token digest of a header is not that of its run")
    checks = struct.unpack_from(f"<{count * members}Q", view, run_end)
    name = ObjectName(group, parent, run, members)
    return RecordHeader(namespace, rank, row_bytes, name, checks)


def _members(block_count: int, stride: int, payload_bytes: int) -> int:
    """Rows that a header has for each of its blocks, at least one; the sizes may contradict it."""
    block_bytes = block_count * stride
    return max(1, payload_bytes // block_bytes) if block_bytes else 1


def expected_checks(
    data: memoryview, *, namespace: bytes, rank: int, row_bytes: int, name: ObjectName
) -> tuple[int, ...]:
    """The check values in a header that fills `data`, if it is the header of this object.

    Raises:
        ChecksumMismatchError: It is damaged, or of something else. The message says what differs.
    """
    start = _start(namespace, rank, row_bytes, name)
    body = data[: -_CHECKSUM.size]
    (checksum,) = _CHECKSUM.unpack_from(data, len(body))
    if body[: len(start)] != start or checksum != xxh3_64_intdigest(body):
        header = parse_header(data)  # slower, and says what is wrong
        expect_header(header, namespace=namespace, rank=rank, row_bytes=row_bytes, name=name)
        raise ChecksumMismatchError("a header is not of the size that its object has")
    return struct.unpack_from(f"<{name.row_count}Q", data, len(start))


def expect_header(
    header: RecordHeader, *, namespace: bytes, rank: int, row_bytes: int, name: ObjectName
) -> None:
    """Compare every field that identifies an object with what is wanted.

    Raises:
        ChecksumMismatchError: The file is of something else. The message says what differs.
    """
    found = header.name
    differs = [
        field
        for field, is_other in (
            ("namespace", header.namespace != namespace),
            ("rank", header.rank != rank),
            ("row size", header.row_bytes != row_bytes),
            ("kv group", found.group != name.group),
            ("parent hash", found.parent_hash != name.parent_hash),
            ("run", found.run != name.run),
            ("number of members", found.members != name.members),
        )
        if is_other
    ]
    if differs:
        raise ChecksumMismatchError(f"a file is of another object: other {', '.join(differs)}")


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
