"""Taking files of tiers away, beside engines that may use them: never one that is good or alive."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.directory import Slot, find_slots, summarize
from opal_connector.tiers.file_io import DIRECTORY_MODE, put_back
from opal_connector.tiers.file_names import (
    QUARANTINE_NAME,
    new_temporary_name,
    parse_temporary,
)
from opal_connector.tiers.file_sizes import files_under, filesystem_now, used_bytes
from opal_connector.tiers.header_scan import list_directory, read_header, scan_headers
from opal_connector.tiers.leftovers import remove_leftovers
from opal_connector.tiers.slot_removal import (
    Removed,
    remove_objects,
    remove_slot,
    used_by,
)


def quarantine(root: Path, slot: Slot, path: str, check: Callable[[str], object]) -> bool:
    """Move a bad file out of its tier; whether it is gone from there.

    It is checked again once nobody can replace it any more: a good file that took its place in the
    meantime goes back.
    """
    folder = root / QUARANTINE_NAME / slot.namespace / slot.name
    folder.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
    for made in (folder, folder.parent, folder.parent.parent):
        made.chmod(DIRECTORY_MODE)
    # The check compares the name too, so it keeps its own, in a folder of its own.
    own = folder / new_temporary_name().lstrip(".")
    own.mkdir(DIRECTORY_MODE)
    target = own / os.path.basename(path)
    try:
        os.rename(path, target)
    except FileNotFoundError:
        own.rmdir()
        return False
    try:
        check(str(target))
    except ChecksumMismatchError:
        return True
    put_back(str(target), path)
    own.rmdir()
    return False


def collect_garbage(root: Path, removed: Removed) -> None:
    """Remove leftovers of the dead, and objects' files that no reader would accept. Blocks."""
    # Instances that share a directory write at its root too.
    _remove_leftovers(str(root), [entry.path for entry in os.scandir(root)], removed)
    for slot in find_slots(root):
        listing = list_directory(slot.path)
        _remove_leftovers(slot.path, listing.other_paths, removed, has_lock=slot.has_lock)
        for scanned in scan_headers(slot.path, listing.keys):
            if scanned.header is None and not scanned.is_unread:
                _remove_unreadable(scanned.path, removed)


def _remove_leftovers(
    directory: str, paths: list[str], removed: Removed, *, has_lock: bool = False
) -> None:
    temporary = [path for path in paths if parse_temporary(os.path.basename(path))]
    sizes = {path: used_by(path) for path in temporary}
    kept = remove_leftovers(directory, temporary, by_age_only=not has_lock)
    for path in set(temporary) - set(kept):
        removed.leftovers += 1
        removed.freed_bytes += sizes[path]


def _remove_unreadable(path: str, removed: Removed) -> None:
    # Taken out of sight first, as a store may put a good file there at any time.
    claimed = f"{os.path.dirname(path)}/{new_temporary_name()}"
    try:
        os.rename(path, claimed)
    except FileNotFoundError:
        return
    if read_header(claimed).header is not None:
        put_back(claimed, path)
        return
    size = used_by(claimed)
    if os.path.isdir(claimed):
        os.rename(claimed, path)  # not ours
        return
    os.unlink(claimed)
    removed.unreadable += 1
    removed.freed_bytes += size


def remove_namespaces(
    root: Path, removed: Removed, *, namespace: str = "", older_than_seconds: float | None = None
) -> None:
    """Remove namespaces that no living process uses: those of this name, or long unused. Blocks.

    A name is the directory's, or any longer beginning of the namespace's digits.
    """
    now = filesystem_now(str(root)) if older_than_seconds is not None else 0.0
    for name, slots in _by_namespace(root):
        if namespace and not namespace.startswith(name):
            continue
        if older_than_seconds is not None:
            # All of it or nothing: ranks that are missing make the others' objects useless.
            newest_use = max(summarize(slot).newest_use for slot in slots)
            if now - newest_use <= older_than_seconds:
                continue
        for slot in slots:
            remove_slot(slot, removed)
        with contextlib.suppress(OSError):  # something else is in there
            os.rmdir(root / name)


def clear(root: Path, removed: Removed) -> None:
    """Remove all objects, and what is in quarantine. Slots that are in use stay, empty. Blocks."""
    for name, slots in _by_namespace(root):
        for slot in slots:
            if not remove_slot(slot, removed):
                remove_objects(slot, removed)
        with contextlib.suppress(OSError):  # something else is in there
            os.rmdir(root / name)
    place = root / QUARANTINE_NAME
    if place.is_dir():
        removed.freed_bytes += used_bytes(files_under(str(place)))
        shutil.rmtree(place)


def _by_namespace(root: Path) -> Iterator[tuple[str, list[Slot]]]:
    spaces: dict[str, list[Slot]] = {}
    for slot in find_slots(root):
        spaces.setdefault(slot.namespace, []).append(slot)
    yield from spaces.items()
