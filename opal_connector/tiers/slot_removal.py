"""Taking whole slots away: what one rank of one process kept, when no process uses it."""

import contextlib
import os
import shutil
from pathlib import Path

import msgspec

from opal_connector.tiers.directory import Slot, find_slots, object_paths, summarize
from opal_connector.tiers.file_names import INDEX_NAME, LOCK_NAME, parse_temporary
from opal_connector.tiers.file_sizes import files_under, used_bytes
from opal_connector.tiers.header_scan import list_directory
from opal_connector.tiers.slot_lock import try_lock


class Removed(msgspec.Struct, kw_only=True):
    """What a command took away. `in_use` are slots that it left alone."""

    objects: int = 0
    leftovers: int = 0
    unreadable: int = 0
    slots: list[str] = []
    in_use: list[str] = []
    freed_bytes: int = 0


def make_room_among_others(root: Path, *, own_namespace: str, excess_bytes: int) -> Removed:
    """Remove slots of other namespaces that no process uses, the longest unused first. Blocks.

    Stops when so many bytes are free. What belongs to a shared tier, which has no locks, stays.

    Raises:
        OSError: The root cannot be read.
    """
    removed = Removed()
    others = [
        summarize(slot)
        for slot in find_slots(root)
        if slot.namespace != own_namespace and slot.has_lock
    ]
    others.sort(key=lambda summary: summary.newest_use)
    paths = {(slot.namespace, slot.name): slot for slot in find_slots(root)}
    for summary in others:
        if removed.freed_bytes >= excess_bytes:
            break
        remove_slot(paths[summary.namespace, summary.slot], removed)
    return removed


def remove_slot(slot: Slot, removed: Removed) -> bool:
    """Remove what a tier keeps in a slot, unless a process uses it; whether it did. Blocks.

    What is not a tier's stays, and the directories in which it is.
    """
    lock = try_lock(slot.path) if slot.has_lock else None
    if slot.has_lock and lock is None:
        removed.in_use.append(f"{slot.namespace}/{slot.name}")
        return False
    try:
        remove_objects(slot, removed)
        for path in list_directory(slot.path).other_paths:
            if parse_temporary(os.path.basename(path)) or path == f"{slot.path}/{INDEX_NAME}":
                removed.freed_bytes += used_by(path)
                remove_any(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{slot.path}/{LOCK_NAME}")
        with contextlib.suppress(OSError):  # something else is in there
            os.rmdir(slot.path)
    finally:
        if lock is not None:
            os.close(lock)
    removed.slots.append(f"{slot.namespace}/{slot.name}")
    return True


def remove_objects(slot: Slot, removed: Removed) -> None:
    """Remove the files of a slot's objects, and the folders that they leave empty. Blocks."""
    for path in object_paths(slot, list_directory(slot.path).keys):
        size = used_by(path)
        try:
            os.unlink(path)
        except (FileNotFoundError, IsADirectoryError):
            continue  # somebody was faster, or it is not ours
        removed.objects += 1
        removed.freed_bytes += size
    for entry in os.scandir(slot.path):
        if len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):  # something is in there
                os.rmdir(entry.path)


def used_by(path: str) -> int:
    """Bytes of a file, or of all files in a directory. Blocks."""
    if os.path.isdir(path) and not os.path.islink(path):
        return used_bytes(files_under(path))
    return used_bytes([path])


def remove_any(path: str) -> None:
    """Remove a file or a directory that may be gone already. Blocks."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
