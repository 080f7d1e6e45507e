"""Settings for engines that neither a list of processes nor a log of arguments may show."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class PrivateFiles:
    """Files for us and what we start alone, in a directory that is made with the first of them.

    Mutable state: the directory, and a lock on it, by which services that clear out what is old
    leave it alone. Used by one thread.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._lock: int | None = None

    def write(self, name: str, contents: Mapping[str, Any]) -> Path:
        """Put a mapping into a file of that name, as JSON; what was there is replaced.

        Raises:
            OSError: It cannot be written.
        """
        path = self._made() / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(contents, file)
        return path

    def close(self) -> None:
        """Remove all of them."""
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _made(self) -> Path:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="opal-serve-"))  # for its owner alone
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # some filesystems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return self.directory
