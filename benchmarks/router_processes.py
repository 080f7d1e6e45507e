"""`opal router` as a process under measurement, and the processor time of such processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPAL = [sys.executable, "-m", "opal_connector.cli.main"]
_STOP_SECONDS = 20.0


@dataclass(frozen=True)
class RouterProcess:
    """A router that serves, in a session of its own, whose number is its `pid`."""

    url: str
    pid: int


def opal_router_has(option: str) -> bool:
    """Whether `opal router` knows an option."""
    shown = subprocess.run([*OPAL, "router", "--help"], capture_output=True, text=True, check=True)
    return option in shown.stdout


@contextlib.contextmanager
def running_opal_router(
    config: Mapping[str, Any], log_path: Path, *options: str
) -> Iterator[RouterProcess]:
    """Our router with a configuration, for the length of a `with` block."""
    config_path = log_path.with_suffix(".json")
    config_path.write_text(json.dumps(config))
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [*OPAL, "router", "--config", str(config_path), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield RouterProcess(_url_said(process, log_path), process.pid)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _url_said(process: "subprocess.Popen[str]", log_path: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("Serving at "):
            return line.split()[2]
    raise RuntimeError(f"opal router did not start:\n{log_path.read_text()[-2000:]}")
