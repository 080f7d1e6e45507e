"""Names of the files in a rank's directory, and their headers read in a few threads."""

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import msgspec

from opal_connector.tiers import file_io
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.file_names import object_path, parse_object_file
from opal_connector.tiers.record import (
    ALIGNMENT,
    RecordHeader,
    announced_header_bytes,
    file_bytes,
    parse_header,
)

SCAN_THREADS: Final = 4
_BATCH: Final = 64  # files for one thread at a time
_FAN_OUT_DIGITS: Final = 2
Item = TypeVar("Item")
Result = TypeVar("Result")


class Listing(msgspec.Struct):
    """What lies in a rank's directory: keys of objects, and paths of everything else."""

    keys: list[bytes] = []
    other_paths: list[str] = []


class ScannedFile(msgspec.Struct, frozen=True, gc=False):
    """An object's file and its header; `fault` says why there is none.

    `is_unread` tells a file that vanished or could not be read now from one that is damaged.
    """

    path: str
    header: RecordHeader | None = None
    mtime_ns: int = 0
    fault: str = ""
    is_unread: bool = False


def list_directory(directory: str) -> Listing:
    """All names in a rank's directory; opens no file. Blocks.

    Raises:
        OSError: The directory cannot be read.
    """
    listing = Listing()
    for name in sorted(os.listdir(directory)):
        path = f"{directory}/{name}"
        if len(name) != _FAN_OUT_DIGITS or not os.path.isdir(path) or os.path.islink(path):
            listing.other_paths.append(path)
            continue
        for file_name in os.listdir(path):
            key = parse_object_file(file_name) if file_name.startswith(name) else None
            if key is None:
                listing.other_paths.append(f"{path}/{file_name}")
            else:
                listing.keys.append(key)
    return listing


def read_header(path: str) -> ScannedFile:
    """The header of an object's file, whole and of the size that the file has. Blocks.

    Raises:
        OSError: The file cannot be read, though it is there.
    """
    try:
        file = file_io.open_for_reading(path)
    except FileNotFoundError:
        return ScannedFile(path, is_unread=True, fault="gone")
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ChecksumMismatchError("it is no file")
        data = os.pread(file, ALIGNMENT, 0)
        size = announced_header_bytes(data)
        if size > len(data):
            data += os.pread(file, size - len(data), len(data))
        header = parse_header(data)
        expected = file_bytes(header.name.block_count, header.row_bytes, header.name.members)
        if status.st_size != expected:
            raise ChecksumMismatchError(f"a file has {status.st_size} bytes, not {expected}")
    except ChecksumMismatchError as error:
        return ScannedFile(path, mtime_ns=status.st_mtime_ns, fault=str(error))
    finally:
        os.close(file)
    return ScannedFile(path, header, status.st_mtime_ns)


def scan_headers(directory: str, keys: Iterable[bytes]) -> Iterator[ScannedFile]:
    """The headers of these objects' files, in their order, read ahead by little. Blocks.

    A file that cannot be read is reported as unread: a fault of one is no fault of all.
    """

    def read(key: bytes) -> ScannedFile:
        path = object_path(directory, key)
        try:
            return read_header(path)
        except OSError as error:
            return ScannedFile(path, fault=error.strerror or str(error), is_unread=True)

    yield from map_ahead(read, keys)


def map_ahead(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int = SCAN_THREADS
) -> Iterator[Result]:
    """`map` in a few threads that run at most two batches each ahead of who takes the results."""

    def run(batch: list[Item]) -> list[Result]:
        return [function(item) for item in batch]

    waiting: deque[Future[list[Result]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="opal-scan") as pool:
        for batch in batches(items, _BATCH):
            waiting.append(pool.submit(run, batch))
            if len(waiting) >= 2 * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of at most `size` items, in their order."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
