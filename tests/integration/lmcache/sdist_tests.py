"""LMCache's own tests, which are in its source distribution only and are not copied here."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

CONTRACT_TESTS = "tests/v1/distributed/test_mock_l2_adapter.py"
_DIGESTS = {"0.5.6": "248adfe677430ac8fe3060bce2d1030c98aff415db2d0f9b6735d3e7d5ce39b6"}
_FETCH_SECONDS = 240


class NotAvailableError(Exception):
    """The tests are not at hand; the message says why."""


def contract_tests() -> ModuleType:
    """The module with the contract tests of L2 adapters, fetched once into the user's cache.

    Raises:
        NotAvailableError: They cannot be had.
    """
    release = version("lmcache")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "opal-tests" / f"lmcache-{release}" / Path(CONTRACT_TESTS).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _fetch(release, path)
    if hashlib.sha256(path.read_bytes()).hexdigest() != _DIGESTS.get(release):
        raise NotAvailableError(f"{path} is not the file that this test was written for")
    spec = importlib.util.spec_from_file_location("lmcache_l2_contract", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fetch(release: str, path: Path) -> None:
    """Have pip unpack the source distribution, and take the one file.

    What pip does after unpacking, asking the build system for metadata, may fail: it needs a
    compiler for devices, and nothing of it is needed here.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-clean", "--no-deps"]
        command += ["--no-binary", ":all:", "--no-build-isolation", "--retries", "1"]
        command += ["--timeout", "15", "-d", folder, f"lmcache=={release}"]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "TMPDIR": folder, "NO_NATIVE_EXT": "1"},
                capture_output=True,
                text=True,
                timeout=_FETCH_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotAvailableError(f"pip: {error}") from None
        found = sorted(Path(folder).rglob(CONTRACT_TESTS))
        if not found:
            raise NotAvailableError(f"no source distribution of lmcache: {done.stderr[-300:]}")
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(found[0].read_bytes())
        temporary.rename(path)
