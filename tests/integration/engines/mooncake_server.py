"""A real `mooncake_master` and a process that gives it memory: started, paused, filled, restarted.

The process that gives memory is a plain client of the library's own: it is also how tests reach
values around ours.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from opal_connector.cli.server_process import free_port
from opal_connector.tiers.engines import EngineClient
from opal_connector.tiers.engines.mooncake import MooncakeClient

PATIENCE_SECONDS = 30.0
LEASE_SECONDS = 1.0


class MooncakeServer:
    """A master on free ports, and the process that gives it memory.

    Mutable state: the two processes; used by one thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        memory_mib: int = 256,
        lease_seconds: float = LEASE_SECONDS,
        is_http: bool = False,
    ) -> None:
        self._directory = directory
        self._memory_bytes = memory_mib << 20
        port = free_port(3)
        self.master = f"127.0.0.1:{port}"
        self.admin = f"127.0.0.1:{port + 1}"
        self.metadata = f"http://127.0.0.1:{port + 2}/metadata" if is_http else "P2PHANDSHAKE"
        self._command = [
            str(_program()),
            f"--rpc_port={port}",
            f"--metrics_port={port + 1}",
            f"--http_metadata_server_port={port + 2}",
            f"--enable_http_metadata_server={str(is_http).lower()}",
            "--http_metadata_server_host=127.0.0.1",
            "--metrics_host=127.0.0.1",
            "--rpc_address=127.0.0.1",
            f"--default_kv_lease_ttl={int(1000 * lease_seconds)}",
            "--client_ttl=3",
            "--put_start_discard_timeout_sec=2",
            "--put_start_release_timeout_sec=3",
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._provider: SpawnProcess | None = None
        self._ask: Connection | None = None

    # ---- processes ----

    def start(self) -> None:
        """Both; returns when a value can be stored."""
        self.start_master()
        self.start_provider()

    def start_master(self) -> None:
        with (self._directory / "master.log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self._fetch("/metrics")
                return
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)

    def start_provider(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ask, theirs = context.Pipe()
        log = str(self._directory / "provider.log")
        self._provider = context.Process(
            target=_provide,
            args=(theirs, log, self.master, self.metadata, self._memory_bytes),
            daemon=True,
        )
        self._provider.start()
        theirs.close()
        assert self._answer() == 0, (self._directory / "provider.log").read_text()[-2000:]
        self.wait_until_usable()

    def wait_until_usable(self) -> None:
        """Until a value can be stored and read: both processes know each other."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (self.raw_put("warm", b"warm") and self.raw_get("warm") == b"warm"):
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        self.raw_delete("warm")

    def stop(self) -> None:
        """End both at once, as crashes do; paused ones, too."""
        self.stop_master()
        self.stop_provider()

    def stop_master(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop_provider(self) -> None:
        if self._provider is not None:
            self._provider.kill()
            self._provider.join()
            self._provider = None
        if self._ask is not None:
            self._ask.close()
            self._ask = None

    def pause(self, *, master: bool = True, provider: bool = True) -> None:
        """SIGSTOP; returns when it has arrived."""
        for pid in self._pids(master, provider):
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        for pid in self._pids(True, True):
            os.kill(pid, signal.SIGCONT)

    def restart(self) -> None:
        """Empty: memory is all that it has."""
        self.stop()
        self.start()

    def _pids(self, master: bool, provider: bool) -> list[int]:
        pids = [self._process.pid] if master and self._process is not None else []
        if provider and self._provider is not None and self._provider.pid is not None:
            pids.append(self._provider.pid)
        return pids

    def log(self) -> str:
        return (self._directory / "master.log").read_text(errors="replace")[-2000:]

    # ---- values, around our client ----

    def raw_get(self, key: str) -> bytes | None:
        return self._call("get", key)

    def raw_put(self, key: str, value: bytes) -> bool:
        """In the place of whatever is there, leased or not."""
        self.raw_delete(key)
        return bool(self._call("put", key, value) == 0)

    def raw_delete(self, key: str) -> None:
        self._call("remove", key, True)

    def raw_remove_unforced(self, key: str) -> int:
        """As the master does when it evicts: 0, or -706 for a value that is leased."""
        return int(self._call("remove", key, False))

    def raw_start_put(self, key: str, size_bytes: int) -> int:
        """Begin to write a value, and leave it at that."""
        return int(self._call("batch_put_session_start", [key], [size_bytes])[0])

    def raw_keys(self) -> list[str]:
        return self._fetch("/get_all_keys").decode().split()

    def _fetch(self, path: str) -> bytes:
        with urllib.request.urlopen(
            f"http://{self.admin}{path}", timeout=PATIENCE_SECONDS
        ) as answer:
            return bytes(answer.read())

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._ask is not None
        self._ask.send((name, arguments))
        return self._answer()

    def _answer(self) -> Any:
        assert self._ask is not None
        assert self._ask.poll(PATIENCE_SECONDS), "the process that gives memory does not answer"
        return self._ask.recv()


def _provide(asked: Connection, log: str, master: str, metadata: str, memory_bytes: int) -> None:
    """Give the store memory, and do to values what is asked, until nobody asks any more."""
    file = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(file, 2)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    buffer_bytes = 64 << 20
    asked.send(store.setup("127.0.0.1", metadata, memory_bytes, buffer_bytes, "tcp", "", master))
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, arguments = asked.recv()
            if name == "get":
                found = store.get_size(*arguments) >= 0
                asked.send(store.get(*arguments) if found else None)
            else:
                asked.send(getattr(store, name)(*arguments))
    os._exit(0)


def _program() -> Path:
    found = importlib.util.find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        pytest.fail("mooncake-transfer-engine-non-cuda is missing: pip install -e '.[dev]'")
    return Path(found.submodule_search_locations[0]) / "mooncake_master"


@contextlib.contextmanager
def mooncake_server(directory: Path, **options: Any) -> Iterator[MooncakeServer]:
    """A running store, ended when the block ends, however it is by then."""
    server = MooncakeServer(directory, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def wait_until_ready(client: EngineClient) -> None:
    """Until the client's process has loaded the library and answers."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            client.present(["is-it-ready"])
            return
        except OSError:
            if time.monotonic() > deadline:
                raise


def make_client(
    server: MooncakeServer, *, timeout_seconds: float = 10.0, prefix: str = "opal"
) -> MooncakeClient:
    """A client of a store, ready for calls."""
    client = MooncakeClient(
        master=server.master,
        metadata=server.metadata,
        prefix=prefix,
        timeout_seconds=timeout_seconds,
    )
    wait_until_ready(client)
    return client


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens by itself."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def helper_of(client: MooncakeClient) -> int:
    """The process with the library that carries out a client's calls."""
    process = client._process
    assert process is not None
    return process.result()._process.pid


def helper_pids(parent: int = 0) -> list[int]:
    """The processes with the library that a process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            is_helper = any(word.endswith(b".mooncake_helper") for word in words)
            if is_helper and state[0] != "Z" and int(state[1]) == (parent or os.getpid()):
                found.append(int(entry.name))
    return found
