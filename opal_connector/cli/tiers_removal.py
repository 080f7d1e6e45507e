"""Taking files of tiers away, beside engines that may use them: never one that is good or alive."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from opal_connector.integrations.lmcache.context_names import CONTEXTS_NAME, is_context_file
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.directory import Slot, find_slots, summarize
from opal_connector.tiers.file_io import DIRECTORY_MODE, put_back
from opal_connector.tiers.file_names import (
    NAMESPACE_DIGITS,
    QUARANTINE_NAME,
    new_temporary_name,
    parse_temporary,
)
from opal_connector.tiers.file_sizes import files_under, filesystem_now, used_bytes
from opal_connector.tiers.header_scan import list_directory, read_header, scan_headers
from opal_connector.tiers.leftovers import remove_leftovers
from opal_connector.tiers.slot_removal import (
    Removed,
    remove_any,
    remove_objects,
    remove_slot,
    used_by,
)

_NAMESPACE = re.compile(rf"[0-9a-f]{{{NAMESPACE_DIGITS}}}")


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
    for name, slots in _by_namespace(root):
        folder = root / name / CONTEXTS_NAME
        if _is_folder(folder):
            paths = [entry.path for entry in os.scandir(folder)]
            has_lock = any(slot.has_lock for slot in slots)
            _remove_leftovers(str(folder), paths, removed, has_lock=has_lock)


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
            uses = [summarize(slot).newest_use for slot in slots]
            newest_use = max(uses or _context_times(root / name), default=0.0)
            if now - newest_use <= older_than_seconds:
                continue
        is_unused = [remove_slot(slot, removed) for slot in slots]
        _remove_namespace(root / name, removed, is_unused=all(is_unused))


def clear(root: Path, removed: Removed) -> None:
    """Remove all objects, and what is in quarantine. Slots that are in use stay, empty. Blocks."""
    for name, slots in _by_namespace(root):
        in_use = [slot for slot in slots if not remove_slot(slot, removed)]
        for slot in in_use:
            remove_objects(slot, removed)
        _remove_namespace(root / name, removed, is_unused=not in_use)
    place = root / QUARANTINE_NAME
    if place.is_dir():
        removed.freed_bytes += used_bytes(files_under(str(place)))
        shutil.rmtree(place)


def _remove_namespace(space: Path, removed: Removed, *, is_unused: bool) -> None:
    """Remove the directory of a namespace, and the contexts that objects of LMCache had there.

    A server that uses it still needs them for what it stores next.
    """
    folder = space / CONTEXTS_NAME
    if is_unused and _is_folder(folder):
        for entry in os.scandir(folder):
            is_ours = is_context_file(entry.name) and entry.is_file(follow_symlinks=False)
            if is_ours or parse_temporary(entry.name):
                removed.freed_bytes += used_by(entry.path)
                remove_any(entry.path)
        with contextlib.suppress(OSError):  # something else is in there
            os.rmdir(folder)
    with contextlib.suppress(OSError):  # as above
        os.rmdir(space)


def _by_namespace(root: Path) -> Iterator[tuple[str, list[Slot]]]:
    """The namespaces that have slots, and those of which only the contexts are left."""
    spaces: dict[str, list[Slot]] = {}
    for slot in find_slots(root):
        spaces.setdefault(slot.namespace, []).append(slot)
    for folder in root.glob(f"*/{CONTEXTS_NAME}"):
        if _NAMESPACE.fullmatch(folder.parent.name) and _is_folder(folder):
            spaces.setdefault(folder.parent.name, [])
    yield from spaces.items()


def _context_times(space: Path) -> list[float]:
    """When the contexts of a namespace that has no slots were written."""
    found = (path for path in space.glob(f"{CONTEXTS_NAME}/*") if is_context_file(path.name))
    return [path.lstat().st_mtime for path in found]


def _is_folder(path: Path) -> bool:
    """Whether it is a directory in one, neither reached by a link."""
    return path.is_dir() and not path.is_symlink() and not path.parent.is_symlink()
