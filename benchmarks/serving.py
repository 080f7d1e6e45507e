"""Real servers for the benchmarks that need them: vLLM alone, with Opal, with LMCache.

Starting, asking and stopping are those of `opal demo`; here are only the plans and what a
benchmark needs besides.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import OtherLoad

from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_client import ServerClient
from opal_connector.cli.server_process import (
    HOST,
    RunningServer,
    ServerPlan,
    free_port,
    log_tail,
    opal_transfer_config,
    serve,
)
from opal_connector.integrations.lmcache.segments import segments_removed

BLOCK_TOKENS = 32
LMCACHE_MEMORY = ("--l1-size-gb", "1", "--eviction-policy", "LRU")
_READY_SECONDS = 300.0
ARGUMENTS = (
    *("--dtype", "float32"),
    *("--block-size", str(BLOCK_TOKENS)),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    "--enforce-eager",
)


@dataclass(frozen=True)
class PythonPlan(ServerPlan):
    """A server that another interpreter runs."""

    python: str = ""

    def command(self, port: int) -> list[str]:
        """As its base, with `python` in place of this interpreter."""
        command = super().command(port)
        return [self.python, *command[1:]] if self.python else command


@dataclass(frozen=True)
class Server:
    """A server under measurement and the processes that belong to it."""

    running: RunningServer
    client: ServerClient
    sessions: tuple[int, ...]

    def load(self) -> OtherLoad:
        """Begin to watch what is not of this server."""
        return OtherLoad(self.sessions)


@contextlib.contextmanager
def started(plan: ServerPlan, *more_sessions: int) -> Iterator[Server]:
    """A healthy server for the length of a `with` block."""
    with serve(plan, Reporter()) as running, ServerClient(running.url) as client:
        yield Server(running, client, (running.pid, *more_sessions))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for logs."""
    with tempfile.TemporaryDirectory(prefix="opal-benchmark-") as name:
        yield Path(name)


def vllm_plan(model: Path, logs: Path, transfer: dict[str, Any] | None = None) -> ServerPlan:
    """vLLM, by default without a connector."""
    return ServerPlan(
        model=model,
        log_path=logs / "server.log",
        transfer_config=transfer,
        arguments=ARGUMENTS,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )


def opal_plan(model: Path, logs: Path, capacity: str = "1GiB") -> ServerPlan:
    """VLLM with Opal's default chunks in host memory."""
    return vllm_plan(model, logs, opal_transfer_config({"CPUMemory": {"capacity_GB": capacity}}))


def opal_plan_by(python: str, model: Path, logs: Path, tiers: dict[str, Any]) -> ServerPlan:
    """VLLM with Opal in these tiers, run by `python`."""
    plan = vllm_plan(model, logs, opal_transfer_config(tiers))
    environment = {**plan.environment, **_import_path()}
    return PythonPlan(**{**vars(plan), "environment": environment, "python": python})


@contextlib.contextmanager
def lmcache_server(
    model: Path, logs: Path, python: str, storage: Sequence[str] = LMCACHE_MEMORY
) -> Iterator[Server]:
    """VLLM with LMCache's multi-process server, both run by `python`, with its default chunks."""
    with segments_removed(), _lmcache_process(logs, python, storage) as (pid, port):
        plan = PythonPlan(
            model=model,
            log_path=logs / "server.log",
            transfer_config={
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": f"tcp://{HOST}",
                    "lmcache.mp.port": port,
                },
            },
            arguments=ARGUMENTS,
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "LMCACHE_TRACK_USAGE": "false",
                "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
            },
            python=python,
        )
        with started(plan, pid) as server:
            yield server


def _import_path() -> dict[str, str]:
    """Lets another interpreter import this checkout's package."""
    path = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(part for part in path if part)}


@contextlib.contextmanager
def _lmcache_process(logs: Path, python: str, storage: Sequence[str]) -> Iterator[tuple[int, int]]:
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    command = [str(Path(python).parent / "lmcache"), "server"]
    command += ["--host", HOST, "--port", str(port), "--http-host", HOST]
    command += ["--http-port", str(http_port), "--prometheus-port", str(metrics_port)]
    command += ["--chunk-size", "256", "--supported-transfer-mode", "lmcache_driven", *storage]
    log_path = logs / "lmcache.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **_import_path(), "LMCACHE_TRACK_USAGE": "false"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, f"http://{HOST}:{http_port}", log_path)
        yield process.pid, port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"lmcache server ended early:\n{log_tail(log_path)}")
        with contextlib.suppress(httpx.HTTPError):
            # Any answer means that it listens.
            httpx.get(url, timeout=5, trust_env=False)
            return
        time.sleep(0.2)
    raise RuntimeError(f"lmcache server did not come up:\n{log_tail(log_path)}")


def has_lmcache(python: str) -> bool:
    """Whether that interpreter can import LMCache."""
    code = (
        "import importlib.util, json; print(json.dumps(bool(importlib.util.find_spec('lmcache'))))"
    )
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.returncode == 0 and json.loads(found.stdout)
