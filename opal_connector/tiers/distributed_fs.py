"""`DistributedFS`: a directory that instances on several hosts share. No lock, no index."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final

from typing_extensions import override

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.file_errors import ObjectGoneError, as_gone
from opal_connector.tiers.file_names import object_key, object_path, slot_name
from opal_connector.tiers.file_sizes import files_under, used_bytes
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.header_scan import (
    batches,
    list_directory,
    map_ahead,
    scan_headers,
)
from opal_connector.tiers.journal import PAGE_NAMES
from opal_connector.tiers.leftovers import remove_leftovers
from opal_connector.transfers import ObjectName

TOUCH_SECONDS: Final = 60.0
_MAX_REMEMBERED: Final = 1 << 16


class DistributedFS(FileTier):
    """Files that other instances read and write too.

    The order of use is that of the files' modification times, stamped by the server. Mutable state
    besides that of `FileTier`: when a file was stamped last, guarded by `_lock`.
    """

    name: ClassVar[str] = "DistributedFS"

    def __init__(
        self,
        root: Path,
        *,
        row_bytes: int,
        rank: int,
        fsync: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(root, row_bytes=row_bytes, rank=rank, fsync=fsync)
        self._clock = clock
        self._lock = threading.Lock()
        self._stamped: dict[bytes, float] = {}
        self._strangers: list[str] = []

    @override
    def touch(self, keys: Sequence[bytes]) -> None:
        """Give the files the server's time, each at most once a minute. Blocks.

        Raises:
            OSError: The medium failed. A file that is not there is no error.
        """
        for key in self._due(keys):
            try:
                os.utime(object_path(self._directory, key))
            except OSError as error:
                if not isinstance(as_gone(error), ObjectGoneError):
                    raise
                # Another instance removed it.

    @override
    def _take_directory(self, namespace: bytes) -> str:
        directory = f"{self._namespace_directory(namespace)}/{slot_name(self.rank, 0)}"
        self._make_directory(directory)
        return directory

    @override
    def _inventory(self) -> Iterator[tuple[ObjectName, ...]]:
        listing = list_directory(self._directory)
        self._strangers = remove_leftovers(self._directory, listing.other_paths, by_age_only=True)
        ages = [pair for pair in map_ahead(self._modified, listing.keys) if pair is not None]
        ages.sort()
        for page in batches(self._readable(key for _, key in ages), PAGE_NAMES):
            yield tuple(page)

    def _modified(self, key: bytes) -> tuple[int, bytes] | None:
        try:
            return os.stat(object_path(self._directory, key)).st_mtime_ns, key
        except FileNotFoundError:
            return None

    def _readable(self, keys: Iterator[bytes]) -> Iterator[ObjectName]:
        """Names of the files that are whole. The others stay: they may be somebody's."""
        for scanned in scan_headers(self._directory, keys):
            header = scanned.header
            if header is not None:
                try:
                    self._expect(header, header.name)
                except ChecksumMismatchError:
                    pass
                else:
                    if object_path(self._directory, object_key(header.name)) == scanned.path:
                        yield header.name
                        continue
            if not scanned.is_unread:
                self._strangers.append(scanned.path)

    @override
    def _count_foreign_bytes(self) -> int:
        others = files_under(str(self.root), skip={self._directory})
        return used_bytes(others) + used_bytes(self._strangers)

    def _due(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that were not stamped within the last minute, which they are now."""
        now = self._clock()
        with self._lock:
            due = [
                key
                for key in dict.fromkeys(keys)
                if now - self._stamped.get(key, now - TOUCH_SECONDS) >= TOUCH_SECONDS
            ]
            if len(self._stamped) + len(due) > _MAX_REMEMBERED:
                self._stamped = {
                    key: then for key, then in self._stamped.items() if now - then < TOUCH_SECONDS
                }
            self._stamped.update(dict.fromkeys(due, now))
        return due
