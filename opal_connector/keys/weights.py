"""Fingerprints of model and adapter weights.

A hub snapshot is named by its commit and the blobs it links to, both content hashes already. Any
other directory is read once: the digest of every config and weight file is cached under the user's
cache directory by path, size, mtime and inode, so that one changed byte is another fingerprint
and the same copy elsewhere is the same one.
"""

import contextlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
_CONFIG_NAMES = frozenset({"config.json", "adapter_config.json", "params.json"})
_READ_BYTES = 8 << 20


def weights_fingerprint(model: str) -> str:
    """The identity of the weights that `model` (a path, or a hub name) stands for.

    A name that is not a path on this machine cannot be read: the name itself is then the identity,
    marked as such, and `weights_id` in the configuration is the way to do better. Blocks while it
    reads a local directory that was not read before.
    """
    path = Path(model)
    if path.is_dir():
        return snapshot_fingerprint(path) or directory_fingerprint(path)
    if path.is_file():
        return _digest_of({path.name: _cached_file_digest(path, _load_cache())})
    return f"name:{model}"


def snapshot_fingerprint(directory: Path) -> str | None:
    """The identity of a hub snapshot (`.../snapshots/<commit>`), None for any other directory."""
    resolved = directory.absolute()
    if resolved.parent.name != "snapshots":
        return None
    blobs: dict[str, str] = {}
    for file in _identity_files(directory):
        if not file.is_symlink():
            return None
        blobs[str(file.relative_to(directory))] = file.resolve().name
    return _digest_of(blobs) if blobs else None


def directory_fingerprint(directory: Path) -> str:
    """A content hash of the config and weight files of a directory.

    Files are read in parallel. A directory without such files has the fingerprint of nothing.
    """
    cache = _load_cache()
    files = _identity_files(directory)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda file: _cached_file_digest(file, cache), files)
        named = {
            str(file.relative_to(directory)): digest
            for file, digest in zip(files, digests, strict=True)
        }
    _save_cache(cache)
    return _digest_of(named)


def _identity_files(directory: Path) -> list[Path]:
    return sorted(
        file
        for file in directory.rglob("*")
        if file.is_file() and (file.suffix in _WEIGHT_SUFFIXES or file.name in _CONFIG_NAMES)
    )


def _digest_of(named: dict[str, str]) -> str:
    return sha256(json.dumps(sorted(named.items())).encode()).hexdigest()


def _cached_file_digest(file: Path, cache: dict[str, str]) -> str:
    stat = file.stat()
    key = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    known = cache.get(key)
    if known is not None:
        return known
    digest = sha256()
    with file.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            digest.update(data)
    cache[key] = digest.hexdigest()
    return cache[key]


def _cache_file() -> Path:
    base = os.environ.get("OPAL_CACHE_DIR")
    if base:
        return Path(base) / "weights.json"
    xdg = os.environ.get("XDG_CACHE_HOME")
    root = Path(xdg) if xdg else Path.home() / ".cache"
    return root / "opal_connector" / "weights.json"


def _load_cache() -> dict[str, str]:
    try:
        loaded = json.loads(_cache_file().read_text())
    except (OSError, ValueError):
        return {}  # a missing or torn cache costs one read of the weights
    if not isinstance(loaded, dict):
        return {}
    return {str(key): str(value) for key, value in loaded.items()}


def _save_cache(cache: dict[str, str]) -> None:
    target = _cache_file()
    # A read-only home only means that the next start reads the weights again.
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix="weights-")
        with os.fdopen(handle, "w") as stream:
            json.dump(cache, stream)
        os.replace(name, target)
