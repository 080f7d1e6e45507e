"""Virtual environments of the routers, made with pip once and used again.

Each router has its own: they pin versions that vLLM does not have.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_READY: Final = "opal-interop-ready"


@dataclass(frozen=True)
class Environment:
    """A router and what it needs beside it."""

    name: str
    requirements: tuple[str, ...]


DYNAMO: Final = Environment("dynamo-1.6.1", ("ai-dynamo-runtime==1.6.1", "pydantic", "uvloop"))
VLLM_ROUTER: Final = Environment(
    "vllm-router-0.1.17",
    (
        *("vllm-router==0.1.17", "setproctitle", "aiohttp", "orjson", "uvicorn", "fastapi"),
        "requests",
    ),
)


def ensure(environment: Environment, root: Path) -> Path:
    """The environment's `bin` directory; it is made first when it is not whole."""
    directory = root / environment.name
    mark = directory / _READY
    if not mark.exists():
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *environment.requirements], check=True, stdout=sys.stderr)
        mark.touch()
    return directory / "bin"
