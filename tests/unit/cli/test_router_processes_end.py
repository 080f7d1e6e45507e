"""What the parent of a router's processes sees to: that they end, and that the port is its own."""

import asyncio
import signal
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from opal_connector.cli import router_processes
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.router_processes import RouterProcesses
from opal_connector.cluster.router.config import router_config

PATIENCE_SECONDS = 60.0


def stubborn(_config: Any, _share: Any, connection: Connection, _is_verbose: bool) -> None:
    """A process that serves and does not hear that it is to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.send("http://127.0.0.1:1")
    time.sleep(PATIENCE_SECONDS)


def test_a_process_that_does_not_end_is_killed_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One signal is enough: a process that hangs does not keep the router for good."""
    monkeypatch.setattr(router_processes, "_process", stubborn)
    monkeypatch.setattr(router_processes, "_GRACE_SECONDS", 0.2)
    config = router_config({"port": 0, "workers": 1, "limits": {"drain_seconds": 0.2}})
    processes = RouterProcesses(config, is_verbose=False)

    async def body() -> None:
        running = asyncio.create_task(processes.run())
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            while "Serving at" not in capsys.readouterr().out:
                await asyncio.sleep(0.01)
        processes._on_signal()
        await asyncio.wait_for(running, PATIENCE_SECONDS / 2)

    asyncio.run(body())
    assert [process.exitcode for process in processes._running.values()] == [-signal.SIGKILL]
    assert not processes._directory.exists()


def test_a_port_that_another_router_shares_among_its_processes_is_taken() -> None:
    """Else both would be given requests that are meant for one of them."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = router_config({"port": other.getsockname()[1], "workers": 2})
        with pytest.raises(CommandFailure, match="cannot be listened at"):
            RouterProcesses(config, is_verbose=False)
