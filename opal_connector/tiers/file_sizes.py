"""How much lies where, in bytes that the filesystem really uses."""

import os
from collections.abc import Collection, Iterable, Iterator

from opal_connector.tiers import file_io
from opal_connector.tiers.file_names import new_temporary_name

_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the filesystem's own is


def used_bytes(paths: Iterable[str]) -> int:
    """Bytes that these files take; one that vanished takes none. Blocks."""
    total = 0
    for path in paths:
        try:
            total += os.stat(path, follow_symlinks=False).st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue
    return total


def files_under(root: str, *, skip: Collection[str] = ()) -> Iterator[str]:
    """Paths of all files in a tree, but not those under the directories `skip`. Blocks.

    A directory that vanishes, or that may not be read, has no files.
    """
    for directory, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if f"{directory}/{folder}" not in skip]
        for name in names:
            yield f"{directory}/{name}"


def filesystem_now(directory: str) -> float:
    """The time of the clock that stamps files in a directory. Writes a file there. Blocks.

    A server's clock is not this host's; ages are compared with this.

    Raises:
        OSError: Nothing can be written there.
    """
    path = f"{directory}/{new_temporary_name()}"
    file = file_io.create(path, direct=False)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
        os.unlink(path)
