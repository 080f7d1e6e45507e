"""Vectored reads and writes between files and rows, past the page cache where that is possible.

Python itself repeats a call that a signal interrupted; what is short is continued here.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Final

from typing_extensions import Buffer

from opal_connector.tiers.base import Rows
from opal_connector.tiers.file_names import new_temporary_name
from opal_connector.tiers.record import ALIGNMENT

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
_MAX_BUFFERS: Final = os.sysconf("SC_IOV_MAX")
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_NEW_FILE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Where bytes behind an expected end go; all threads write there, and nobody reads it.
_BEYOND: Final = mmap.mmap(-1, ALIGNMENT)
_OLD_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def aligned_buffer(size: int) -> mmap.mmap:
    """Zeroed memory that begins at a page: what direct I/O needs."""
    return mmap.mmap(-1, size)


def allows_direct(rows: Rows) -> bool:
    """Whether every row lies so in memory that direct I/O can use it."""
    if not rows.size:
        return True
    address = rows.__array_interface__["data"][0]
    return not (address % ALIGNMENT or rows.shape[1] % ALIGNMENT or rows.strides[0] % ALIGNMENT)


def supports_direct(directory: str) -> bool:
    """Whether files here can be written past the page cache; tried with one small file. Blocks.

    On a full medium that cannot be found out, and the page cache always works.

    Raises:
        OSError: The directory cannot be written to at all.
    """
    if not _DIRECT:
        return False
    path = f"{directory}/{new_temporary_name()}"
    try:
        file = create(path, direct=True)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EDQUOT):
            return False
        raise
    finally:
        # A filesystem that refuses the flag may have created the file before.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    try:
        os.pwrite(file, aligned_buffer(ALIGNMENT), 0)
    except OSError:
        return False  # some filesystems take the flag, and refuse at the first write
    finally:
        os.close(file)
    return True


def create(path: str, *, direct: bool) -> int:
    """The descriptor of a new file that nobody else may read. Follows no link, replaces nothing."""
    return os.open(path, _NEW_FILE | (_DIRECT if direct else 0), FILE_MODE)


def open_for_reading(path: str, *, direct: bool = False) -> int:
    """The descriptor of a file that is there. Follows no link."""
    return os.open(path, _OLD_FILE | (_DIRECT if direct else 0))


def put_back(claimed: str, path: str) -> None:
    """Give a file its name back, unless there is another one by now; then it is removed. Blocks.

    Raises:
        OSError: The medium failed.
    """
    try:
        os.link(claimed, path, follow_symlinks=False)
    except FileExistsError:
        pass  # the newer one counts
    except OSError:
        os.rename(claimed, path)  # a filesystem without links
        return
    os.unlink(claimed)


def adjacent_runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Slices of `numbers` in which each one follows the one before, as (start, stop)."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield start, stop
            start = stop


def row_buffers(rows: Rows, numbers: Sequence[int], paddings: Sequence[Buffer]) -> list[Buffer]:
    """Views of these rows, as few as possible; behind each its padding, if there are any."""
    if paddings:
        pairs = zip(numbers, paddings, strict=True)
        return [piece for number, padding in pairs for piece in (rows[number].data, padding)]
    if rows.strides[0] != rows.shape[1]:
        return [rows[number].data for number in numbers]
    return [
        rows[numbers[start] : numbers[stop - 1] + 1].data for start, stop in adjacent_runs(numbers)
    ]


def write_fully(file: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all bytes of all buffers. Blocks.

    Raises:
        OSError: The medium failed; some of the bytes may be written.
    """
    left = _views(buffers)
    while left:
        done = os.pwritev(file, left[:_MAX_BUFFERS], offset)
        if done == 0:
            raise OSError(errno.EIO, "the medium takes no more bytes and does not say why")
        offset += done
        left = _after(left, done)


def read_fully(file: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Fill all buffers. Blocks.

    Raises:
        EOFError: The file ends before.
        OSError: The medium failed.
    """
    left = _views(buffers)
    while left:
        done = os.preadv(file, left[:_MAX_BUFFERS], offset)
        if done == 0:
            raise EOFError(offset)
        offset += done
        left = _after(left, done)


def read_to_end(file: int, buffers: Sequence[Buffer], offset: int) -> bool:
    """Fill all buffers; whether the file was seen to end with them. Blocks.

    Raises:
        EOFError: The file ends before.
        OSError: The medium failed.
    """
    views = _views(buffers)
    wanted = sum(map(len, views))
    if len(views) < _MAX_BUFFERS:
        done = os.preadv(file, [*views, _BEYOND], offset)
        if done >= wanted:
            return done == wanted
        views, offset = _after(views, done), offset + done
    read_fully(file, views, offset)
    return False  # nobody looked behind them


def _views(buffers: Sequence[Buffer]) -> list[memoryview]:
    return [view.cast("B") for buffer in buffers if (view := memoryview(buffer)).nbytes]


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `done` bytes."""
    for position, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[position + 1 :]]
        done -= len(buffer)
    return []
