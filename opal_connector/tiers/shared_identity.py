"""A name for a shared directory, the same for everybody who mounts it, wherever he does."""

import os
import re
import secrets
from pathlib import Path
from typing import Final

from opal_connector.tiers.file_io import DIRECTORY_MODE
from opal_connector.tiers.file_names import new_temporary_name

IDENTITY_NAME: Final = "identity"
_DIGITS: Final = 32
_VALID: Final = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")


def shared_identity(root: Path) -> str:
    """The directory's own name, given by whoever asked first and never changed. Blocks.

    Raises:
        OSError: The directory cannot be used.
        ValueError: Something else is in the name's place.
    """
    os.makedirs(root, DIRECTORY_MODE, exist_ok=True)
    path = root / IDENTITY_NAME
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    temporary = root / new_temporary_name()
    try:
        temporary.write_text(secrets.token_hex(_DIGITS // 2))
        try:
            os.link(temporary, path)  # whole, and only the first one succeeds
        except FileExistsError:
            pass
        except OSError:
            _create(path)  # a filesystem without links
    finally:
        temporary.unlink(missing_ok=True)
    return _read(path)


def _create(path: Path) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return  # whoever reads it too early finds it too short, and asks again later
    try:
        os.write(file, secrets.token_hex(_DIGITS // 2).encode())
    finally:
        os.close(file)


def _read(path: Path) -> str:
    text = path.read_text()
    if _VALID.fullmatch(text) is None:
        raise ValueError(f"{path.name} holds no name of a directory")
    return text
