"""A real `redis-server` in a process of its own, which tests start, stop, pause and fill."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from opal_connector.cli.server_process import free_port

PATIENCE_SECONDS = 20.0


class ValkeyServer:
    """One server on a free port, with a directory of its own.

    `admin` goes around the client under test. Mutable state: the process; used by one thread.
    """

    def __init__(self, directory: Path, *, options: Sequence[str] = (), password: str = "") -> None:
        self.directory = directory
        self.port = free_port()
        self.password = password
        self._options = list(options)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def socket_path(self) -> Path:
        return self.directory / "socket"

    def start(
        self, maxmemory: str = "0", policy: str = "noeviction", *, appendonly: bool = False
    ) -> None:
        program = shutil.which("valkey-server") or shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is missing: scripts/setup-engines installs it")
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--unixsocket", str(self.socket_path), "--dir", str(self.directory)]
        command += ["--save", "", "--appendonly", "yes" if appendonly else "no"]
        command += ["--maxmemory", maxmemory, "--maxmemory-policy", policy]
        command += ["--requirepass", self.password] if self.password else []
        self._started_with = (maxmemory, policy, appendonly)
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self._options], stdout=log, stderr=log)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with contextlib.suppress(Exception):
                if self.command("PING") in (True, b"PONG"):
                    return
            assert self._process is not None
            log = (self.directory / "log").read_text(errors="replace")[-2000:]
            assert self._process.poll() is None, f"the server ended: {log}"
            assert time.monotonic() < deadline, f"the server does not answer: {log}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End it at once, as a crash does; stops a paused one, too."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:  # the signal is sent; wait until it has arrived
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def restart(self, *, empty: bool) -> None:
        """With what it had on disk (`appendonly`), or without."""
        self.stop()
        if empty:
            shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)
        maxmemory, policy, appendonly = self._started_with
        self.start(maxmemory, policy, appendonly=appendonly)

    def command(self, *words: Any) -> Any:
        """The answer to one command, by a connection of its own that is not our client's."""
        import redis

        with redis.Redis(
            unix_socket_path=str(self.socket_path),
            password=self.password or None,
            socket_timeout=PATIENCE_SECONDS,
        ) as client:
            return client.execute_command(*words)

    def value(self, name: str) -> bytes | None:
        return self.command("GET", name)

    def fill(self, values: Mapping[str, str]) -> None:
        self.command("MSET", *itertools.chain.from_iterable(values.items()))

    def has(self, name: str) -> bool:
        return bool(self.command("EXISTS", name))


@contextlib.contextmanager
def valkey_server(
    directory: Path, *, options: Sequence[str] = (), password: str = "", **start: Any
) -> Iterator[ValkeyServer]:
    """A running server, stopped at the end however it is by then."""
    server = ValkeyServer(directory, options=options, password=password)
    try:
        server.start(**start)
        yield server
    finally:
        server.stop()


class ScriptedServer:
    """Does with every connection what a test says, where no Redis can be made to do it.

    Mutable state: the listening socket and the connections, closed by `close`.
    """

    def __init__(self, script: Callable[[socket.socket], None]) -> None:
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> "ScriptedServer":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_SECONDS)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._script(connection)


def answering(answer: bytes) -> Callable[[socket.socket], None]:
    """A script: one and the same answer to whatever comes, as often as something comes."""

    def script(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            connection.sendall(answer)

    return script


def trickling(start: bytes) -> Callable[[socket.socket], None]:
    """A script: an answer that begins at once and goes on, one byte at a time, for ever."""

    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(start)
        pause = threading.Event()
        while not pause.wait(0.05):
            connection.sendall(b"x")

    return script
