"""One process per directory: a lock that the system gives up when the process ends, however."""

import fcntl
import os

from opal_connector.tiers import file_io
from opal_connector.tiers.file_names import LOCK_NAME

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def try_lock(directory: str) -> int | None:
    """The descriptor that holds the lock of a directory; None if another process holds it.

    Closing it gives the lock up. Does not wait.

    Raises:
        OSError: The directory is not there, or has no lock of this kind.
    """
    path = f"{directory}/{LOCK_NAME}"
    while True:
        file = os.open(path, _FLAGS, file_io.FILE_MODE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(file, path):
                return file
        except BlockingIOError:
            os.close(file)
            return None
        except BaseException:
            os.close(file)
            raise
        # Somebody removed the directory between the two calls: that lock protects nothing.
        os.close(file)


def _is_same(file: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(file)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
