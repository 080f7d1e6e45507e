"""Fingerprints of model and adapter weights.

A hub snapshot is named by the blobs it links to, whose names are content hashes already. Anything
else is read once: the digest of every config, code and weight file is cached under the user's cache
directory by path, size, mtime and inode, so that one changed byte is another fingerprint and the
same copy elsewhere is the same one.
"""

import contextlib
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

# Code too: a model that brings its own computes other KV when it changes.
_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors", ".py"})
_NAMES = frozenset(
    {
        "config.json",
        "adapter_config.json",
        "params.json",
        "quant_config.json",
        "quantize_config.json",
        "hf_quant_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
_READ_BYTES = 8 << 20
_BLOB_NAME = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # git's SHA-1, or SHA-256
_DIGEST = re.compile(r"[0-9a-f]{64}")


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
        return _fingerprint({path.name: path})
    return f"name:{model}"


def snapshot_fingerprint(directory: Path) -> str | None:
    """The identity of a hub snapshot (`.../snapshots/<commit>`), None for any other directory."""
    resolved = directory.absolute()
    if resolved.parent.name != "snapshots":
        return None
    blobs: dict[str, str] = {}
    for file in _identity_files(directory):
        blob = file.resolve()
        if not (blob.parent.name == "blobs" and _BLOB_NAME.fullmatch(blob.name)):
            return None
        blobs[str(file.relative_to(directory))] = blob.name
    return _digest_of(blobs) if blobs else None


def directory_fingerprint(directory: Path) -> str:
    """A content hash of the config and weight files of a directory.

    Files are read in parallel. A directory without such files has the fingerprint of nothing.
    """
    return _fingerprint(
        {str(file.relative_to(directory)): file for file in _identity_files(directory)}
    )


def _fingerprint(files: dict[str, Path]) -> str:
    cache = _load_cache()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        digests = pool.map(lambda file: _cached_file_digest(file, cache), files.values())
        named = dict(zip(files, digests, strict=True))
    _save_cache(cache)
    return _digest_of(named)


def _identity_files(directory: Path) -> list[Path]:
    return sorted(
        file
        for file in directory.rglob("*")
        if file.is_file() and (file.suffix in _SUFFIXES or file.name in _NAMES)
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
    except (OSError, ValueError, RecursionError):
        return {}  # a missing or torn cache costs one read of the weights
    if not isinstance(loaded, dict):
        return {}
    return {
        key: value
        for key, value in loaded.items()
        if isinstance(value, str) and _DIGEST.fullmatch(value)
    }


def _save_cache(cache: dict[str, str]) -> None:
    target = _cache_file()
    # A read-only home only means that the next start reads the weights again.
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix="weights-")
        with os.fdopen(handle, "w") as stream:
            json.dump(cache, stream)
        os.replace(name, target)
