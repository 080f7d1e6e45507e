"""Model directories on disk: built beside their place, moved in whole, and checked when used.

What goes into a model is decided elsewhere; here nothing knows of tensors or tokenizers.
A directory is the model only together with its manifest, which is written last.
"""

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from opal_connector.cli.errors import CommandError
from opal_connector.cli.progress import Reporter

MANIFEST_NAME: Final = "opal_manifest.json"
_HASH_PIECE_BYTES: Final = 1 << 20

Parameters = dict[str, int | str]


class FileRecord(msgspec.Struct, frozen=True):
    """What one file of a ready model must be."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a ready directory holds and how it came to be."""

    name: str
    parameters: Parameters
    revision: int
    origin: dict[str, str]
    files: dict[str, FileRecord]


@dataclass(frozen=True)
class ModelRecipe:
    """A model that can be built: `build` fills an empty directory it is given."""

    name: str
    parameters: Parameters
    revision: int
    build: Callable[[Path, Reporter], None]
    origin: dict[str, str] = field(default_factory=dict)


def cache_directory() -> Path:
    """The user's cache: $OPAL_CACHE_DIR, else opal_connector in the desktop standard's place."""
    if chosen := os.environ.get("OPAL_CACHE_DIR"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "opal_connector"


def models_directory() -> Path:
    """Where models lie that were not asked for elsewhere; every directory in it is ours."""
    return cache_directory() / "models"


def file_sha256(path: Path) -> str:
    """The checksum of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while piece := source.read(_HASH_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, or None when there is none that can be read."""
    try:
        return msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def find_fault(directory: Path, manifest: Manifest | None, *, verify: bool) -> str | None:
    """What is wrong with a directory by its own manifest, or None when it is ready to use.

    Compares sizes; with `verify`, every byte.
    """
    if manifest is None:
        return "its manifest is missing or unreadable"
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record.size_bytes:
            return f"{name} has the wrong size"
        if verify and file_sha256(path) != record.sha256:
            return f"{name} has the wrong checksum"
    return None


def ensure_model(
    recipe: ModelRecipe, output: Path | None, *, verify: bool = False, reporter: Reporter
) -> Path:
    """Returns the directory of a ready model, after building it where it is absent or damaged.

    Ensures: at no moment does the directory hold half a model; of several processes that ask
    at once, one builds and the others wait for it.
    """
    target = Path(os.path.realpath(output or models_directory() / recipe.name))
    if _is_ready(recipe, target, verify=verify):
        reporter.say(f"{recipe.name}: ready")
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(target, reporter):
        # Another process may have built it while this one waited.
        if _is_ready(recipe, target, verify=verify):
            reporter.say(f"{recipe.name}: ready, made by another process")
            return target
        if output is not None:
            _refuse_foreign(recipe, target)
        elif target.is_dir():
            reporter.say(f"{recipe.name}: damaged or out of date, building it again")
        with staging(target) as place:
            recipe.build(place, reporter)
            write_manifest(recipe, place)
            publish(place, target)
    reporter.say(f"{recipe.name}: built")
    return target


def _is_ready(recipe: ModelRecipe, target: Path, *, verify: bool) -> bool:
    manifest = read_manifest(target)
    return (
        manifest is not None
        and (manifest.name, manifest.parameters) == (recipe.name, recipe.parameters)
        and manifest.revision == recipe.revision
        and find_fault(target, manifest, verify=verify) is None
    )


def _refuse_foreign(recipe: ModelRecipe, target: Path) -> None:
    """Raises unless the place a user chose is free, or holds this very model and nothing else."""
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise CommandError(f"{target} is a file; --output names a directory.")
    present = {path.name for path in target.iterdir()}
    if not present:
        return
    manifest = read_manifest(target)
    if manifest is None:
        raise CommandError(f"{target} holds other files; choose an empty or new directory.")
    if (manifest.name, manifest.parameters) != (recipe.name, recipe.parameters):
        raise CommandError(f"{target} holds another model ({manifest.name}); delete it first.")
    if strangers := sorted(present - manifest.files.keys() - {MANIFEST_NAME}):
        raise CommandError(
            f"{target} must be built again but also holds {strangers[0]}; move that away first."
        )


def write_manifest(recipe: ModelRecipe, directory: Path) -> None:
    """Records every file of a finished directory; the last file that is written."""
    files = {
        path.name: FileRecord(path.stat().st_size, file_sha256(path))
        for path in sorted(directory.iterdir())
    }
    manifest = Manifest(recipe.name, recipe.parameters, recipe.revision, recipe.origin, files)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (directory / MANIFEST_NAME).write_bytes(text + b"\n")


@contextlib.contextmanager
def exclusive(target: Path, reporter: Reporter) -> Iterator[None]:
    """Holds the lock of one target; the kernel frees it when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        reporter.say(f"{target.name}: waiting for another process that is making it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def staging(target: Path) -> Iterator[Path]:
    """Gives a new directory beside the target, which is gone afterwards unless published.

    Requires: the target's lock is held. So whatever staging directory of this target is found
    belongs to a dead process, because a living one would hold the lock.
    """
    ours = re.compile(re.escape(f".{target.name}.") + r"[0-9a-f]{16}\.tmp")
    for path in target.parent.iterdir():
        if ours.fullmatch(path.name):
            shutil.rmtree(path)
    place = _staging_path(target)
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def publish(source: Path, target: Path) -> None:
    """Moves a finished file or directory to its place, surviving a crash at any moment."""
    for path in (*source.iterdir(), source) if source.is_dir() else (source,):
        _sync(path)
    if target.is_dir() and any(target.iterdir()):
        # Two steps: a directory cannot replace a full one. A crash between them means absent.
        retired = _staging_path(target)
        target.rename(retired)
        source.rename(target)
        shutil.rmtree(retired)
    else:
        source.rename(target)
    _sync(target.parent)


def _staging_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
