"""What lies under the root of a tier of files, seen from outside: for tools, and read-only.

Works beside engines that use the directory: what vanishes meanwhile is not there, and nothing here
takes a lock.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from opal_connector.tiers import file_io
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.checks import verify_row
from opal_connector.tiers.file_names import (
    INDEX_NAME,
    LOCK_NAME,
    NAMESPACE_DIGITS,
    object_key,
    object_path,
    parse_temporary,
)
from opal_connector.tiers.header_scan import list_directory, read_header
from opal_connector.tiers.record import RecordHeader, header_bytes, row_stride

_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}")
_SLOT = re.compile(r"r(\d+)(?:-\d+)?")
_BLOCK_BYTES: Final = 512  # the unit of st_blocks
_MAX_BATCH_BYTES: Final = 16 << 20


class Slot(msgspec.Struct, frozen=True):
    """The directory of one rank and process: where it is, and what its path says."""

    path: str
    namespace: str  # the first hex digits
    name: str
    rank: int

    @property
    def has_lock(self) -> bool:
        """Whether one process at a time uses it: LocalNVMe, not DistributedFS."""
        return os.path.exists(f"{self.path}/{LOCK_NAME}")


class SlotSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How much there is in a slot. Times are seconds since 1970 by the filesystem's clock."""

    namespace: str
    slot: str
    rank: int
    objects: int
    used_bytes: int
    newest_use: float
    temporary_files: int
    other_files: int


def find_slots(root: Path) -> list[Slot]:
    """All directories of ranks under a root, in the order of their paths.

    Raises:
        OSError: The root cannot be read.
    """
    return [
        Slot(slot.path, space.name, slot.name, int(match[1]))
        for space in sorted(os.scandir(root), key=lambda entry: entry.name)
        if _NAMESPACE.fullmatch(space.name) and space.is_dir(follow_symlinks=False)
        for slot in sorted(os.scandir(space.path), key=lambda entry: entry.name)
        if (match := _SLOT.fullmatch(slot.name)) and slot.is_dir(follow_symlinks=False)
    ]


def summarize(slot: Slot) -> SlotSummary:
    """Count what is in a slot; opens no file of an object. Blocks.

    Raises:
        OSError: The directory cannot be read.
    """
    listing = list_directory(slot.path)
    objects = used_bytes = 0
    newest_use = 0.0
    for path in object_paths(slot, listing.keys):
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            continue
        objects += 1
        used_bytes += status.st_blocks * _BLOCK_BYTES
        newest_use = max(newest_use, status.st_mtime)
    names = [os.path.basename(path) for path in listing.other_paths]
    temporary = sum(parse_temporary(name) is not None for name in names)
    if INDEX_NAME in names:  # uses are noted there, and not in the files
        newest_use = max(newest_use, _modified(f"{slot.path}/{INDEX_NAME}"))
    known = temporary + (INDEX_NAME in names) + (LOCK_NAME in names)
    return SlotSummary(
        namespace=slot.namespace,
        slot=slot.name,
        rank=slot.rank,
        objects=objects,
        used_bytes=used_bytes,
        newest_use=newest_use,
        temporary_files=temporary,
        other_files=len(names) - known,
    )


def object_paths(slot: Slot, keys: list[bytes]) -> Iterator[str]:
    """The paths of these objects' files."""
    return (object_path(slot.path, key) for key in keys)


def is_placed_right(slot: Slot, path: str, header: RecordHeader) -> bool:
    """Whether a file lies where the object that its header names belongs."""
    return (
        header.namespace.hex().startswith(slot.namespace)
        and header.rank == slot.rank
        and os.path.basename(object_path("", object_key(header.name))) == os.path.basename(path)
    )


def verify_file(slot: Slot, path: str) -> int:
    """Read an object's file and compare every byte with its check values; its size. Blocks.

    Raises:
        ChecksumMismatchError: It is damaged, or does not belong where it lies.
        FileNotFoundError: It is not there.
        OSError: It cannot be read.
    """
    scanned = read_header(path)
    if scanned.is_unread:
        raise FileNotFoundError(path)
    if scanned.header is None:
        raise ChecksumMismatchError(scanned.fault)
    if not is_placed_right(slot, path, scanned.header):
        raise ChecksumMismatchError("a file lies under a name that is not its own")
    return _verify_rows(path, scanned.header)


def _verify_rows(path: str, header: RecordHeader) -> int:
    row_bytes, stride = header.row_bytes, row_stride(header.row_bytes)
    stamps = header.name.stamps
    offset = header_bytes(header.name.block_count, header.name.members)
    batch_rows = max(1, min(header.row_count, _MAX_BATCH_BYTES // stride))
    rows = np.empty((batch_rows, stride), dtype=np.uint8)
    file = file_io.open_for_reading(path)
    try:
        for first in range(0, header.row_count, batch_rows):
            count = min(batch_rows, header.row_count - first)
            file_io.read_fully(file, [rows[:count].data], offset)
            offset += count * stride
            for row, position in zip(rows, range(first, first + count), strict=False):
                expected = header.checks[position]
                verify_row(row[:row_bytes], stamps, position, expected, "a row is damaged")
                if row[row_bytes:].any():
                    raise ChecksumMismatchError("there are bytes between the rows of a file")
    except EOFError as error:
        raise ChecksumMismatchError("a file ends too early") from error
    finally:
        os.close(file)
    return offset


def _modified(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return 0.0
