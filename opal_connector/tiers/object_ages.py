"""All objects under a shared root with their sizes and last use, and the order in which they go."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from opal_connector.tiers.file_names import parse_object_file

_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the filesystem's own is


class FoundObject(msgspec.Struct, gc=False):
    """One object of one namespace, with the files of all its ranks; ages by the server's clock."""

    namespace: str
    key: bytes
    paths: tuple[str, ...]
    size_bytes: int
    used_ns: int


def scan_objects(root: Path) -> list[FoundObject]:
    """Every object under a root. Files that are no objects are not looked at. Blocks.

    Raises:
        OSError: The root cannot be read. What vanishes meanwhile is not there.
    """
    objects: dict[tuple[str, bytes], FoundObject] = {}
    for namespace in _directories(str(root)):
        for rank in _directories(namespace.path):
            for folder in _directories(rank.path):
                _scan_folder(namespace.name, folder.path, objects)
    return list(objects.values())


def oldest_first(
    objects: Sequence[FoundObject], *, namespace: str, parents: Mapping[bytes, bytes]
) -> list[FoundObject]:
    """Objects in the order in which they are to go: the longest unused first, tails before heads.

    `parents` maps keys of `namespace` to the keys of their parents: a parent counts as used when
    its last descendant was.
    """
    by_key = {found.key: found for found in objects if found.namespace == namespace}
    used = {key: found.used_ns for key, found in by_key.items()}
    for key in sorted(used, key=used.__getitem__, reverse=True):
        when = used[key]
        parent = parents.get(key)
        while parent is not None and used.get(parent, when + 1) <= when:
            when += 1
            used[parent] = when
            parent = parents.get(parent)

    def age(found: FoundObject) -> int:
        return used[found.key] if found.namespace == namespace else found.used_ns

    return sorted(objects, key=age)


def _scan_folder(
    namespace: str, folder: str, objects: dict[tuple[str, bytes], FoundObject]
) -> None:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        key = parse_object_file(entry.name)
        if key is None:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        size_bytes = status.st_blocks * _BLOCK_BYTES
        found = objects.get((namespace, key))
        if found is None:
            objects[namespace, key] = FoundObject(
                namespace, key, (entry.path,), size_bytes, status.st_mtime_ns
            )
        else:
            found.paths = (*found.paths, entry.path)
            found.size_bytes += size_bytes
            found.used_ns = max(found.used_ns, status.st_mtime_ns)


def _directories(path: str) -> list["os.DirEntry[str]"]:
    try:
        return [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
