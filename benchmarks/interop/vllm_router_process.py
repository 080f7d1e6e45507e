"""`vllm-router` as a process, started with any options and waited for."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from opal_connector.cli.server_process import free_port

DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.1
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class VllmRouterProcess:
    """One that is healthy, in a session of its own, whose number is its `pid`."""

    url: str
    metrics_url: str
    pid: int
    log_path: Path

    def log_text(self) -> str:
        """All that it has written, without colours."""
        return _COLOURS.sub("", self.log_path.read_text(errors="replace"))


@contextlib.contextmanager
def running(
    binaries: Path,
    options: Sequence[str],
    log_path: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[VllmRouterProcess]:
    """A router for the length of a `with` block; its engines are healthy when this begins."""
    port, metrics_port = free_port(), free_port()
    command = [str(binaries / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics_port), "--worker-startup-check-interval", "1"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, *options],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        urls = (f"http://127.0.0.1:{number}" for number in (port, metrics_port))
        router = VllmRouterProcess(*urls, process.pid, log_path)
        _await_health(router, process)
        yield router
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_health(router: VllmRouterProcess, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{router.url}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"vllm-router did not start:\n{router.log_text()[-2000:]}")
