"""The example of Opal under LMCache as users run it: its processes, and what is asked of them."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from l2_world import until
from server_status import adapter_status, status

from opal_connector.cli.server_client import Answer, ServerClient
from opal_connector.cli.server_process import free_port, log_tail

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = Path("/dev/shm")
SERVE = ROOT / "examples" / "lmcache" / "serve.py"
CHUNK_TOKENS = 256
ANSWER_TOKENS = 16
START_SECONDS = 300.0
LOOK_MILLISECONDS = 200  # the processes that start want the processor
STOP_SECONDS = 90.0
_HITS = "vllm:external_prefix_cache_hits_total"


class Ports:
    """Where the example's processes listen."""

    def __init__(self) -> None:
        self.vllm, self.lmcache, self.status = free_port(), free_port(), free_port()
        self.events = free_port()

    def options(self, cache: Path) -> list[str]:
        """What the example is told of them."""
        return [
            *("--port", str(self.vllm), "--lmcache-port", str(self.lmcache)),
            *("--lmcache-http-port", str(self.status), "--events-port", str(self.events)),
            *("--cache", str(cache)),
        ]

    def kvbm(self, command: str, *options: str) -> dict[str, Any]:
        """One of `opal kvbm` about LMCache's server, as JSON."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "opal_connector.cli.main", "kvbm", command, "--json"),
                *("--instance", f"tcp://127.0.0.1:{self.events}", *options),
            ],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.stdout, done.stderr
        return dict(json.loads(done.stdout))


def environment() -> dict[str, str]:
    """Children find this package and ask nobody for models."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "LMCACHE_DISABLE_BANNER": "1",
    }


@contextlib.contextmanager
def example(log: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """The example's command, ended as Ctrl-C would end it, after which no memory is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SERVE), *options], env=environment(), stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            held = shared_memory_of(process.pid)
            process.terminate()
            process.wait(STOP_SECONDS)
        assert not [path for path in held if path.exists()]


def shared_memory_of(process_id: int) -> set[Path]:
    """What a process's children have of /dev/shm. A server has that of engines mapped, too."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process_id).children(recursive=True)
    found: set[Path] = set()
    for child in children:
        with contextlib.suppress(psutil.Error):
            maps = (Path(one.path) for one in child.memory_maps())
            found |= {path for path in maps if path.parent == SHARED_MEMORY}
    ids = {str(child.pid) for child in children}
    return {
        path
        for path in found
        if not path.name.startswith("lmcache_kv_") or path.name.split("_")[2] in ids
    }


@contextlib.contextmanager
def lmcache_alone(ports: Ports, cache: Path, log: Path) -> Iterator[None]:
    """LMCache's server with Opal's adapter, when it answers."""
    with example(log, "--only", "lmcache", *ports.options(cache)) as process:
        _await(process, lambda: bool(status(ports.status)), log)
        yield


@contextlib.contextmanager
def vllm(ports: Ports, cache: Path, log: Path, *how: str) -> Iterator["Instance"]:
    """An engine with LMCache's connector, when it is healthy. `how` is --only vllm by default."""
    with example(log, *(how or ("--only", "vllm")), *ports.options(cache)) as process:
        url = f"http://127.0.0.1:{ports.vllm}"
        _await(process, lambda: _is_healthy(url), log)
        with ServerClient(url) as client:
            yield Instance(client, ports, log)


def _await(process: "subprocess.Popen[bytes]", is_ready: Callable[[], bool], log: Path) -> None:
    def is_decided() -> bool:
        return process.poll() is not None or is_ready()

    until(is_decided, "the example runs", START_SECONDS, LOOK_MILLISECONDS)
    assert process.poll() is None, log_tail(log, 60)


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    return False


class Instance:
    """One vLLM behind which LMCache's server is."""

    def __init__(self, client: ServerClient, ports: Ports, log: Path) -> None:
        self._client = client
        self._ports = ports
        self.log = log

    def ask(self, prompt: list[int]) -> tuple[Answer, int]:
        """The answer, and how many tokens of its prompt came from LMCache.

        They are counted in the step that begins the request, long before its answer ends.
        """
        before = self._hits()
        answer = self._client.complete(prompt, max_tokens=ANSWER_TOKENS)
        return answer, self._hits() - before

    def empty_device(self) -> None:
        """Forget what the device has."""
        self._client.reset_prefix_cache()

    def await_stored(self, chunks: int) -> None:
        """Wait until Opal has so many chunks, the last of them on disk, too."""

        def has_all() -> bool:
            tiers = adapter_status(self._ports.status)["tiers"]
            return [tier["object_count"] for tier in tiers] == [chunks, chunks]

        until(has_all, "all chunks are in both tiers", pause_milliseconds=LOOK_MILLISECONDS)

    def _hits(self) -> int:
        return round(sum(s.value for s in self._client.samples() if s.name == _HITS))
