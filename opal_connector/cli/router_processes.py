"""Several processes that are one router: they share the port, and what they count."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.serving.backoff import Backoff
from opal_connector.cli.serving.schema import RestartSettings

if TYPE_CHECKING:
    from opal_connector.cluster.router.config import RouterConfig
    from opal_connector.cluster.router.siblings import Share

_RESTARTS: Final = RestartSettings(first_seconds=0.2, longest_seconds=30.0, limit=None)
_START_SECONDS: Final = 120.0
_GRACE_SECONDS: Final = 10.0  # beyond the time to drain
_POLL_SECONDS: Final = 0.05


class RouterProcesses:
    """The processes of one router, started, watched and ended.

    Mutable state: the processes by number, what they report, whether they are to end and by when;
    the main thread's alone.

    Args:
        config: The router's configuration; its port becomes a real one.
        is_verbose: Whether they say more.
    """

    def __init__(self, config: "RouterConfig", *, is_verbose: bool) -> None:
        self._is_verbose = is_verbose
        self._spawn = multiprocessing.get_context("spawn")
        self._held = _held_port(config.host, config.port)
        self._config = msgspec.structs.replace(
            config,
            port=self._held.getsockname()[1],
            queue=msgspec.structs.replace(
                config.queue, max_queue=-(-config.queue.max_queue // config.workers)
            ),
        )
        self._directory = Path(tempfile.mkdtemp(prefix="opal-router-"))  # for its owner alone
        self._running: dict[int, BaseProcess] = {}
        self._reports: dict[int, Connection] = {}
        self._signals = 0
        self._end_by: float | None = None  # then those that have not ended are killed

    async def run(self) -> None:
        """Serve until a signal; a second one does not wait for what is under way.

        Raises:
            CommandFailure: A process does not come up.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            url = await self._start_all()
            if not self._is_ending():
                count = len(self._config.instances)
                click.echo(
                    f"Serving at {url} with {count} instances, by {self._config.workers} processes."
                )
            watchers = [asyncio.create_task(self._keep(number)) for number in list(self._running)]
            await asyncio.gather(*watchers)
        finally:
            self._end()

    # ---- inside ----

    def _is_ending(self) -> bool:
        return self._signals > 0

    async def _start_all(self) -> str:
        """Start them at once and wait until each serves; returns where."""
        for number in range(self._config.workers):
            self._start(number)
        return (await asyncio.gather(*map(self._served, self._running)))[0]

    def _start(self, number: int) -> None:
        from opal_connector.cluster.router.siblings import Share

        here, there = self._spawn.Pipe(duplex=False)
        share = Share(self._directory, number, self._config.workers)
        process = self._spawn.Process(
            target=_process,
            args=(self._config, share, there, self._is_verbose),
            name=f"router-{number}",
        )
        process.start()
        there.close()
        self._running[number] = process
        self._reports[number] = here  # kept, whether or not somebody waits for it

    async def _served(self, number: int) -> str:
        process, connection = self._running[number], self._reports[number]
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ending():
            if connection.poll():
                try:
                    url: str = connection.recv()
                except EOFError:
                    process.join()
                    raise CommandFailure(
                        f"Process {number} of the router ended with code {process.exitcode}."
                    ) from None
                return url
            if time.monotonic() > deadline:
                raise CommandFailure(f"Process {number} of the router does not come up.")
            await asyncio.sleep(_POLL_SECONDS)
        return ""

    async def _keep(self, number: int) -> None:
        """Start a process again whenever it ends, until all are to end."""
        backoff = Backoff(_RESTARTS)
        while not self._is_ending():
            began = time.monotonic()
            await self._ended(number)
            if self._is_ending():
                return
            code = self._running[number].exitcode
            wait = backoff.next_wait(time.monotonic() - began)
            assert wait is not None
            click.echo(f"Process {number} of the router ended with code {code}; again.", err=True)
            deadline = time.monotonic() + wait
            while time.monotonic() < deadline and not self._is_ending():
                await asyncio.sleep(_POLL_SECONDS)
            if not self._is_ending():
                self._start(number)
        await self._ended(number)

    async def _ended(self, number: int) -> None:
        """Wait for its end, and no longer than it may take."""
        process = self._running[number]
        while process.is_alive() and (self._end_by is None or time.monotonic() < self._end_by):
            await asyncio.sleep(_POLL_SECONDS)

    def _on_signal(self) -> None:
        self._begin_to_end()
        for process in self._running.values():
            if process.is_alive():
                process.terminate()

    def _begin_to_end(self) -> float:
        self._signals += 1
        if self._end_by is None:
            grace_seconds = self._config.limits.drain_seconds + _GRACE_SECONDS
            self._end_by = time.monotonic() + grace_seconds
        return self._end_by

    def _end(self) -> None:
        deadline = self._begin_to_end()
        for process in self._running.values():
            if process.is_alive():
                process.terminate()
        for process in self._running.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._held.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _held_port(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for processes that share it, and takes no connection itself.

    Raises:
        CommandFailure: The address is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if port:
            # Another router may share its port, too: its processes must not share ours.
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        raise CommandFailure(f"{host}:{port} cannot be listened at: {error}.") from error
    return held


def _process(
    config: "RouterConfig", share: "Share", connection: Connection, is_verbose: bool
) -> None:
    """The life of one process. Its parent's end is its own: nobody else could tell it."""
    from opal_connector.cli.router import run_process

    threading.Thread(target=_end_with_parent, daemon=True).start()
    run_process(config, share, connection.send, is_verbose=is_verbose)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
