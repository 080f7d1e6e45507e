"""`LocalNVMe`: a directory that one process has for itself, with an index for fast restarts."""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Final, Protocol

from typing_extensions import override

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.file_names import (
    namespace_name,
    object_key,
    object_path,
    parse_slot,
    slot_name,
)
from opal_connector.tiers.file_sizes import files_under, used_bytes
from opal_connector.tiers.file_tier import FileTier
from opal_connector.tiers.header_scan import batches, list_directory, scan_headers
from opal_connector.tiers.journal import PAGE_NAMES, IndexOwner, Journal, LoadedIndex, load_index
from opal_connector.tiers.leftovers import remove_leftovers
from opal_connector.tiers.slot_lock import try_lock
from opal_connector.tiers.slot_removal import make_room_among_others
from opal_connector.transfers import ObjectName

logger = logging.getLogger(__name__)

_MAX_SLOTS: Final = 1024


class SlotNote(Protocol):
    """Where a process writes which slot it has, for others to read; -1 while it has none."""

    slot: int


class LocalNVMe(FileTier):
    """Files on a disk of this host.

    When another living process has the directory of this rank, the next free slot beside it is
    taken; a restart finds the first free one again. The ranks of one engine share the disk and
    have equal slots. Mutable state besides that of `FileTier`: the slot, its lock's descriptor and
    the journal, set once by `open`; the journal has a lock of its own.
    """

    name: ClassVar[str] = "LocalNVMe"

    def __init__(
        self,
        root: Path,
        *,
        row_bytes: int,
        rank: int,
        fsync: bool = False,
        limit_bytes: int | None = None,
        local_ranks: int = 1,
        slot_note: SlotNote | None = None,
    ) -> None:
        """Make a tier of one of `local_ranks`, which have `limit_bytes` together.

        `slot_note` is where its slot is noted for processes that only read.
        """
        super().__init__(root, row_bytes=row_bytes, rank=rank, fsync=fsync)
        self._slot_note = slot_note
        self._limit_bytes = limit_bytes
        self._local_ranks = local_ranks
        self._slot = 0
        self._lock_file = -1
        self._journal: Journal | None = None
        self._strangers: list[str] = []

    @override
    def touch(self, keys: Sequence[bytes]) -> None:
        """Note the use in the journal. Blocks at most for a flush of it, and raises nothing."""
        if self._journal is not None:
            self._journal.touch(keys)

    @override
    def flush(self) -> None:
        """Write the journal. Blocks, and raises nothing."""
        if self._journal is not None:
            self._journal.flush()

    @override
    def close(self) -> None:
        """Write the journal and let another process have the directory. Blocks."""
        if self._journal is not None:
            self._journal.close()
        self._give_up_lock()

    def _give_up_lock(self) -> None:
        if self._lock_file >= 0:
            file, self._lock_file = self._lock_file, -1
            os.close(file)

    @override
    def _take_directory(self, namespace: bytes) -> str:
        self._give_up_lock()  # of a first try that failed later on
        for slot in range(_MAX_SLOTS):
            directory = f"{self._namespace_directory(namespace)}/{slot_name(self.rank, slot)}"
            self._make_directory(directory)
            lock_file = try_lock(directory)
            if lock_file is not None:
                self._lock_file = lock_file
                self._slot = slot
                if self._slot_note is not None:
                    self._slot_note.slot = slot
                return directory
        raise OSError(f"{_MAX_SLOTS} processes use rank {self.rank} under {self.root}")

    @override
    def _taken_directory(self, namespace: bytes) -> str:
        slot = self._slot_note.slot if self._slot_note is not None else -1
        if slot < 0:
            raise OSError(f"no process has taken rank {self.rank} under {self.root}")
        return f"{self._namespace_directory(namespace)}/{slot_name(self.rank, slot)}"

    @override
    def _inventory(self) -> Iterator[tuple[ObjectName, ...]]:
        owner = IndexOwner(self._namespace, self.rank, self.row_bytes)
        try:
            loaded = load_index(self._directory, owner)
        except OSError:
            loaded = LoadedIndex()  # the headers say the same, only later
        listing = list_directory(self._directory)
        self._strangers = remove_leftovers(self._directory, listing.other_paths)
        is_exact = self._reconcile(loaded, listing.keys)
        self._journal = Journal(self._directory, owner)
        self._journal.resume(loaded, is_exact=is_exact)
        for page in batches(loaded.names.values(), PAGE_NAMES):
            yield tuple(page)

    def _reconcile(self, loaded: LoadedIndex, keys: Sequence[bytes]) -> bool:
        """Make the index say what the files say; whether it did already."""
        present = set(keys)
        dropped = loaded.names.keys() - present
        for key in dropped:
            del loaded.names[key]
        unknown = present - loaded.names.keys()
        found: list[tuple[int, ObjectName]] = []
        for scanned in scan_headers(self._directory, unknown):
            header = scanned.header
            if scanned.is_unread:
                continue
            if header is not None and self._belongs(scanned.path, header.name):
                try:
                    self._expect(header, header.name)
                except ChecksumMismatchError:
                    pass
                else:
                    found.append((scanned.mtime_ns, header.name))
                    continue
            with contextlib.suppress(OSError):  # a file that stays is never read as an object
                os.unlink(scanned.path)
        # What the index does not know is younger than what it knows: its end was not written.
        found.sort(key=lambda pair: pair[0])
        loaded.names.update((object_key(name), name) for _, name in found)
        return not dropped and not unknown

    def _belongs(self, path: str, name: ObjectName) -> bool:
        return object_path(self._directory, object_key(name)) == path

    @override
    def _count_foreign_bytes(self) -> int:
        """What is in this rank's directory, and its share of what others have on the disk."""
        own = [entry.path for entry in os.scandir(self._directory) if entry.is_file()]
        own_bytes = used_bytes({*own, *self._strangers})
        others_bytes = used_bytes(files_under(str(self.root), skip=self._engine_directories()))
        left_bytes = others_bytes - self._take_from_others(others_bytes + own_bytes)
        return own_bytes + max(0, left_bytes) // self._local_ranks

    def _engine_directories(self) -> set[str]:
        """Where this rank and the other ones of the same engine, which have its slot, store."""
        namespace_directory = self._namespace_directory(self._namespace)
        names = (entry.name for entry in os.scandir(namespace_directory))
        parsed = ((name, parse_slot(name)) for name in names)
        return {
            f"{namespace_directory}/{name}"
            for name, numbers in parsed
            if numbers is not None and numbers[1] == self._slot
        }

    def _take_from_others(self, foreign_bytes: int) -> int:
        """Bytes freed of what other models left behind, if they have more than half of the limit.

        A model that is served no more must not keep the next one from having a cache.
        """
        if self._limit_bytes is None or foreign_bytes <= self._limit_bytes // 2:
            return 0
        removed = make_room_among_others(
            self.root,
            own_namespace=namespace_name(self._namespace),
            excess_bytes=foreign_bytes - self._limit_bytes // 2,
        )
        logger.info(
            "%s: removed %d objects of models that nobody serves now, %d bytes",
            self.name,
            removed.objects,
            removed.freed_bytes,
        )
        return removed.freed_bytes

    @override
    def _published(self, name: ObjectName) -> None:
        if self._journal is not None:
            self._journal.put(name)

    @override
    def _removed(self, key: bytes) -> None:
        if self._journal is not None:
            self._journal.delete(key)
