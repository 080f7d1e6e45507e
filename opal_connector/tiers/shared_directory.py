"""What instances that share a directory have to know of each other: existence, use, the limit.

All calls block. They run in a thread of the scheduler process, never in one of its steps.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers.file_names import (
    host_digits,
    namespace_name,
    object_key,
    object_path,
    own_process,
    slot_name,
)
from opal_connector.tiers.file_sizes import filesystem_now
from opal_connector.tiers.header_scan import list_directory, scan_headers
from opal_connector.tiers.object_ages import FoundObject, oldest_first, scan_objects
from opal_connector.tiers.shared_identity import shared_identity
from opal_connector.tiers.shared_ledger import Ledger, Share, locked_ledger
from opal_connector.tiers.shared_medium import Grant, Refresh
from opal_connector.transfers import ObjectName

_LOCK_SECONDS: Final = 5.0
_TARGET: Final = 0.95  # of the limit: where eviction stops


class SharedDirectory:
    """One instance's view of a directory that others use too.

    Mutable state: `_known`, the objects of this namespace that it has seen, with their names; used
    by one thread.
    """

    first_batch = 4  # every one is a request of its own

    def __init__(self, root: Path, *, namespace: bytes, ranks: int, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self._namespace = namespace_name(namespace)
        self._directories = [
            str(root / self._namespace / slot_name(rank, 0)) for rank in range(ranks)
        ]
        self._known: dict[bytes, ObjectName] = {}
        self._instance = secrets.token_hex(8)

    def identity(self) -> str:
        """The directory's own name, given by whoever asked first. Blocks."""
        return shared_identity(self.root)

    def present(self, names: Sequence[ObjectName]) -> list[bool]:
        """Whether every rank has a file of that name. Blocks.

        Raises:
            OSError: The directory cannot be asked.
        """
        return [self._exists(name) for name in names]

    def changes(self) -> Iterator[Refresh]:
        """All of `refresh` at once: a directory's headers are read fast."""
        yield self.refresh()

    def refresh(self) -> Refresh:
        """What others have written and removed since the last call. Blocks.

        Raises:
            OSError: The directory cannot be read.
        """
        try:
            present = set(list_directory(self._directories[0]).keys)
            for directory in self._directories[1:]:
                present &= set(list_directory(directory).keys)
        except FileNotFoundError:
            present = set()  # no worker has written anything yet, or all of it was taken away
        gone = tuple(self._known.keys() - present)
        for key in gone:
            del self._known[key]
        unknown = present - self._known.keys()
        names = [
            scanned.header.name
            for scanned in scan_headers(self._directories[0], unknown)
            if scanned.header is not None
        ]
        self._known.update((object_key(name), name) for name in names)
        return Refresh(tuple(names), gone)

    def renew(
        self, *, wanted_bytes: int, unused_bytes: int, is_held: Callable[[bytes], bool]
    ) -> Grant:
        """Say what is left of the last grant, and ask for more. Blocks.

        Where it would pass the limit, the objects that nobody has used for longest are removed,
        those of other namespaces included, tails before heads.

        Raises:
            TimeoutError: Another instance is at it for too long.
            OSError: The directory cannot be used.
        """
        with locked_ledger(self.root, timeout_seconds=_LOCK_SECONDS) as ledger:
            share = self._share(ledger)
            ledger.spent_bytes += max(0, share.unused_bytes - unused_bytes)
            share.unused_bytes = unused_bytes
            gone: tuple[bytes, ...] = ()
            if ledger.scanned_bytes < 0 or ledger.total_bytes + wanted_bytes > self.limit_bytes:
                gone = self._make_room(ledger, wanted_bytes, is_held)
            granted_bytes = max(0, min(wanted_bytes, self.limit_bytes - ledger.total_bytes))
            share.unused_bytes += granted_bytes
            return Grant(granted_bytes, ledger.total_bytes, gone)

    def leave(self, *, unused_bytes: int) -> None:
        """Give the rest of the last grant back. Blocks; a directory that is gone is no error."""
        with (
            contextlib.suppress(OSError),
            locked_ledger(self.root, timeout_seconds=_LOCK_SECONDS) as ledger,
        ):
            share = self._share(ledger)
            ledger.spent_bytes += max(0, share.unused_bytes - unused_bytes)
            del ledger.shares[self._instance]

    # ---- inside ----

    def _exists(self, name: ObjectName) -> bool:
        key = object_key(name)
        for directory in self._directories:
            try:
                os.stat(object_path(directory, key))
            except FileNotFoundError:
                return False
        self._known[key] = name
        return True

    def _share(self, ledger: Ledger) -> Share:
        pid, start_time = own_process()
        share = ledger.shares.get(self._instance)
        if share is None:
            share = Share(host_digits(), pid, start_time)
            ledger.shares[self._instance] = share
        share.beat = filesystem_now(str(self.root))
        return share

    def _make_room(
        self, ledger: Ledger, wanted_bytes: int, is_held: Callable[[bytes], bool]
    ) -> tuple[bytes, ...]:
        """Look what there is, and remove the oldest if that is too much."""
        objects = scan_objects(self.root)
        ledger.scanned_bytes = sum(found.size_bytes for found in objects)
        ledger.spent_bytes = 0
        excess_bytes = ledger.total_bytes + wanted_bytes - int(_TARGET * self.limit_bytes)
        if excess_bytes <= self.limit_bytes - int(_TARGET * self.limit_bytes):
            return ()
        gone: list[bytes] = []
        for found in self._by_age(objects):
            if excess_bytes <= 0:
                break
            is_own = found.namespace == self._namespace
            if is_own and is_held(found.key):
                continue
            freed_bytes = _remove(found)
            excess_bytes -= freed_bytes
            ledger.scanned_bytes -= freed_bytes
            if is_own:
                gone.append(found.key)
                self._known.pop(found.key, None)
        return tuple(gone)

    def _by_age(self, objects: Sequence[FoundObject]) -> Iterable[FoundObject]:
        parents = {
            key: name.parent_hash + name.group.to_bytes(2, "little")
            for key, name in self._known.items()
            if name.parent_hash != CHAIN_ROOT
        }
        return oldest_first(objects, namespace=self._namespace, parents=parents)


def _remove(found: FoundObject) -> int:
    """Remove an object's files of all ranks; returns the bytes. What another one removed counts."""
    for path in found.paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return found.size_bytes
