"""Who may still write how much to a shared directory, so that all instances keep one limit.

A file in the directory, changed under a lock: what the last scan found, and what every instance
was granted and has not used. Their sum never exceeds the limit. Ages are told by the clock of the
filesystem, so that hosts need not agree about the time.
"""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from opal_connector.tiers.file_io import DIRECTORY_MODE
from opal_connector.tiers.file_names import host_digits, is_alive, new_temporary_name
from opal_connector.tiers.file_sizes import filesystem_now

LEDGER_NAME: Final = "ledger"
LOCK_NAME: Final = "ledger.lock"
_SILENT_SECONDS: Final = 120.0  # an instance of another host that says nothing for so long is dead
_LOCK_POLL_SECONDS: Final = 0.01


class Share(msgspec.Struct):
    """One instance's part: what it may still write, and when it last said that it lives."""

    host: str
    pid: int
    start_time: int
    unused_bytes: int = 0
    beat: float = 0.0


class Ledger(msgspec.Struct):
    """What lies in the directory as of the last scan, what was promised since, and to whom."""

    scanned_bytes: int = 0
    spent_bytes: int = 0  # written or promised since the scan
    shares: dict[str, Share] = {}

    @property
    def promised_bytes(self) -> int:
        """What instances may still write."""
        return sum(share.unused_bytes for share in self.shares.values())

    @property
    def total_bytes(self) -> int:
        """What may be in the directory at most, whatever the instances do now."""
        return self.scanned_bytes + self.spent_bytes + self.promised_bytes


@contextlib.contextmanager
def locked_ledger(root: Path, *, timeout_seconds: float) -> Iterator[Ledger]:
    """The ledger of a directory, for this process alone; what was changed is written. Blocks.

    A ledger that cannot be read counts as empty: the next scan says what there is.

    Raises:
        TimeoutError: Another instance has it for too long.
        OSError: The directory cannot be used.
    """
    os.makedirs(root, DIRECTORY_MODE, exist_ok=True)
    lock_file = os.open(root / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(lock_file, timeout_seconds)
        ledger = _read(root)
        _forget_dead(ledger, filesystem_now(str(root)))
        yield ledger
        _write(root, ledger)
    finally:
        os.close(lock_file)  # and with it goes the lock


def _lock(file: int, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() > deadline:
                raise TimeoutError("another instance keeps the ledger locked") from error
            time.sleep(_LOCK_POLL_SECONDS)
        else:
            return


def _read(root: Path) -> Ledger:
    try:
        return msgspec.json.decode((root / LEDGER_NAME).read_bytes(), type=Ledger)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Ledger(scanned_bytes=-1)


def _write(root: Path, ledger: Ledger) -> None:
    temporary = root / new_temporary_name()
    try:
        temporary.write_bytes(msgspec.json.encode(ledger))
        temporary.replace(root / LEDGER_NAME)
    finally:
        temporary.unlink(missing_ok=True)


def _forget_dead(ledger: Ledger, now: float) -> None:
    """What a dead instance was promised may have been written: it counts as spent until a scan."""
    for name, share in list(ledger.shares.items()):
        if share.host == host_digits():
            is_dead = not is_alive(share.pid, share.start_time)
        else:
            is_dead = now - share.beat > _SILENT_SECONDS
        if is_dead:
            ledger.spent_bytes += share.unused_bytes
            del ledger.shares[name]
