"""Temporary files that nobody will finish."""

import contextlib
import os
import shutil
from collections.abc import Iterable

from opal_connector.tiers.file_names import TemporaryName, is_leftover, parse_temporary
from opal_connector.tiers.file_sizes import filesystem_now


def remove_leftovers(
    directory: str, paths: Iterable[str], *, by_age_only: bool = False
) -> list[str]:
    """Remove those of `paths` that are leftovers, and give the others. Blocks.

    `by_age_only` is for directories that hosts share, where a process id says little.

    Where the clock cannot be read, as on a full medium, no age is old enough.

    Raises:
        OSError: A leftover cannot be removed.
    """
    kept: list[str] = []
    now: float | None = None
    for path in paths:
        temporary = parse_temporary(os.path.basename(path))
        if temporary is None:
            kept.append(path)
            continue
        if now is None:
            now = _now(directory)
        try:
            age_seconds = now - os.stat(path, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            continue  # its writer has published it
        if by_age_only:
            temporary = TemporaryName(temporary.pid, temporary.start_time, host="")
        if is_leftover(temporary, age_seconds=age_seconds):
            with contextlib.suppress(FileNotFoundError):  # another host was faster
                if os.path.isdir(path):  # objects that were being wiped
                    shutil.rmtree(path)
                else:
                    os.unlink(path)
        else:
            kept.append(path)
    return kept


def _now(directory: str) -> float:
    try:
        return filesystem_now(directory)
    except OSError:
        return float("-inf")
