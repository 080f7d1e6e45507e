"""The client for Mooncake Store when the master, a peer or the library itself fails."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from integration.engines.mooncake_server import (
    PATIENCE_SECONDS,
    MooncakeServer,
    helper_pids,
    make_client,
    mooncake_server,
    until,
)

from opal_connector.cli.server_process import free_port
from opal_connector.config import ConfigError
from opal_connector.tiers import allocate_host_rows
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.mooncake import MooncakeClient
from opal_connector.tiers.file_errors import ObjectGoneError

MIB = 1 << 20
# A machine that does much else wakes a thread late.
SLACK_SECONDS = 1.5
CALLS: dict[str, Callable[[MooncakeClient], object]] = {
    "put": lambda client: client.put("t/new", [b"new"]),
    "get": lambda client: client.get("t/1", 5, [Span(0, [memoryview(bytearray(5))])]),
    "get a part": lambda client: client.get("t/1", 5, [Span(1, [memoryview(bytearray(2))])]),
    "start": lambda client: client.get_start("t/1", 5),
    "present": lambda client: client.present(["t/1"]),
    "remove": lambda client: client.remove(["t/2"]),
    "remove under": lambda client: client.remove_under("t/x/"),
    "touch": lambda client: client.touch(["t/1"]),
}


def ends_in_time(call: Callable[[], object], timeout_seconds: float) -> bool:
    """Whether a call succeeded; that it ended in time is asserted."""
    began = time.monotonic()
    try:
        call()
        return True
    except OSError:
        return False
    finally:
        assert time.monotonic() - began < timeout_seconds + SLACK_SECONDS


def all_fail_in_time(client: MooncakeClient, timeout_seconds: float) -> None:
    """Every call at once, and again: with the process as it is, and with what became of it."""
    for _ in range(2):
        with ThreadPoolExecutor(len(CALLS)) as pool:
            ends = {
                name: pool.submit(ends_in_time, lambda call=call: call(client), timeout_seconds)
                for name, call in CALLS.items()
            }
        assert not [name for name, end in ends.items() if end.result()]


# Silence.


@pytest.mark.parametrize("timeout_seconds", [0.5, 2.0])
def test_silent_master(well: MooncakeServer, timeout_seconds: float) -> None:
    """Every call ends in time, whether the library gives up or must be given up; then all is well.

    With the shorter time the library, which waits in whole seconds, is ended with its process.
    """
    client = make_client(well, timeout_seconds=timeout_seconds)
    until(lambda: ends_in_time(lambda: client.put("t/1", [b"value"]), timeout_seconds))
    well.pause(provider=False)
    all_fail_in_time(client, timeout_seconds)
    well.resume()
    for name, call in CALLS.items():
        until(lambda call=call: ends_in_time(lambda: call(client), timeout_seconds))
        assert name
    client.close()


@pytest.mark.parametrize("timeout_seconds", [0.6, 4.0])
def test_nothing_arrives_after_a_read_has_failed(
    well: MooncakeServer, timeout_seconds: float
) -> None:
    """Rows that the books gave to others meanwhile keep what those wrote.

    The peer stands still in the middle of reads. When it goes on, what it has still to send must
    not get into the rows, whether the library ended the read or the process was ended.
    """
    client = make_client(well, timeout_seconds=timeout_seconds)
    source = allocate_host_rows(row_count=8, row_bytes=2 * MIB)
    into = [allocate_host_rows(row_count=8, row_bytes=2 * MIB) for _ in range(3)]
    source[...] = np.random.default_rng(1).integers(0, 255, source.shape, np.uint8)
    for rows in [source, *into]:
        client.prepare(rows)
    until(lambda: ends_in_time(lambda: client.put("t/1", [source.data]), timeout_seconds))
    until(lambda: ends_in_time(lambda: read(client, into[0]), timeout_seconds))
    done = [threading.Event() for _ in into]

    def work(rows: np.ndarray, event: threading.Event) -> None:
        while ends_in_time(lambda: read(client, rows), timeout_seconds):
            assert np.array_equal(rows, source)
        rows[...] = 255  # as the next owner of the rows does
        event.set()

    threads = [
        threading.Thread(target=work, args=(rows, event), daemon=True)
        for rows, event in zip(into, done, strict=True)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)  # any moment in the middle of reads will do
    well.pause(master=False)
    for event in done:
        assert event.wait(PATIENCE_SECONDS)
    well.resume()
    until(lambda: ends_in_time(lambda: client.put("t/2", [source.data]), timeout_seconds))
    for rows in into:
        assert (rows == 255).all()
    client.close()


def read(client: MooncakeClient, rows: np.ndarray) -> None:
    client.get("t/1", rows.nbytes, [Span(0, [row.data for row in rows])])


# Ends.


def test_master_that_restarts(well: MooncakeServer) -> None:
    """It has forgotten everything; the client finds it again by itself."""
    client = make_client(well, timeout_seconds=3.0)
    client.put("t/1", [b"value"])
    well.stop_master()
    all_fail_in_time(client, 3.0)
    well.start_master()
    well.wait_until_usable()
    until(lambda: ends_in_time(lambda: client.present(["t/1"]), 3.0))
    assert client.present(["t/1"]) == [False]
    with pytest.raises(ObjectGoneError):
        client.get_start("t/1", 5)
    until(lambda: ends_in_time(lambda: client.put("t/1", [b"value"]), 3.0))
    assert client.get_start("t/1", 5) == b"value"
    client.close()


def test_peer_that_ends_takes_its_values_along(well: MooncakeServer) -> None:
    """Until the master knows they are failures, then they are gone; another peer takes new ones."""
    client = make_client(well, timeout_seconds=3.0)
    client.put("t/1", [b"value"])
    well.stop_provider()
    assert not ends_in_time(lambda: client.get_start("t/1", 5), 3.0)
    until(lambda: not client.present(["t/1"])[0])
    with pytest.raises(ObjectGoneError):
        client.get_start("t/1", 5)
    well.start_provider()
    until(lambda: ends_in_time(lambda: client.put("t/1", [b"value"]), 3.0))
    assert client.get_start("t/1", 5) == b"value"
    client.close()


def test_library_that_crashes(well: MooncakeServer) -> None:
    """Its process is replaced; what it had under way has failed, and memory serves on."""
    client = make_client(well)
    rows = allocate_host_rows(row_count=1, row_bytes=MIB)
    client.prepare(rows)
    client.put("t/1", [rows.data])
    before = helper_pids()
    for pid in before:
        os.kill(pid, signal.SIGSEGV)
    until(lambda: not set(helper_pids()) & set(before))
    until(lambda: ends_in_time(lambda: client.put("t/1", [rows.data]), 10.0))
    client.get("t/1", MIB, [Span(0, [rows.data.cast("B")])])
    assert not set(helper_pids()) & set(before)
    client.close()


def test_close_and_oblivion_leave_no_process(well: MooncakeServer) -> None:
    """A client that was closed, and one that was forgotten."""
    before = set(helper_pids())
    client, forgotten = make_client(well), make_client(well)
    assert len(set(helper_pids()) - before) == 2
    client.close()
    client.close()
    with pytest.raises(OSError, match="closed"):
        client.present(["t/1"])
    del forgotten
    gc.collect()
    until(lambda: not set(helper_pids()) - before)


def test_end_of_the_program_is_quiet(well: MooncakeServer) -> None:
    """Without `close`, with a thread in a call: at once, silent, and no process is left."""
    program = (
        "import os, threading, time\n"
        "from opal_connector.tiers.engines.mooncake import MooncakeClient\n"
        f"client = MooncakeClient(master={well.master!r}, timeout_seconds=20)\n"
        "client.put('t/1', [b'value'])\n"
        "assert client.get_start('t/1', 5) == b'value'\n"
        "def work():\n"
        "    while True: client.present(['t/1'])\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "print(client._process.result()._process.pid, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    pid = int(done.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists())


# What is missing.


def test_constructing_connects_to_nothing(tmp_path: Path) -> None:
    """The first call does, and fails in time where there is nobody."""
    master = f"127.0.0.1:{free_port()}"
    began = time.monotonic()
    client = MooncakeClient(master=master, timeout_seconds=2.0)
    client.prepare(allocate_host_rows(row_count=1, row_bytes=4096))
    assert time.monotonic() - began < 0.5
    all_fail_in_time(client, 2.0)
    client.close()
    until(lambda: not helper_pids())


def test_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the extra that has it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"missing: pip install 'opal-connector\[mooncake\]'"):
        MooncakeClient(master="127.0.0.1:1", timeout_seconds=1.0)


def test_missing_system_library_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what could not be loaded, and which package has it."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(
        "raise ImportError('libibverbs.so.1: cannot open shared object file')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    client = MooncakeClient(master="127.0.0.1:1", timeout_seconds=PATIENCE_SECONDS)
    with pytest.raises(OSError, match=r"libibverbs\.so\.1.*Debian's libibverbs1"):
        client.present(["t/1"])
    client.close()


# Memory for the store.


def test_process_that_gives_memory(tmp_path: Path) -> None:
    """A client can be all that a store has; what is in its memory goes with it."""
    server = MooncakeServer(tmp_path)
    try:
        server.start_master()
        giver = MooncakeClient(master=server.master, segment_bytes=64 * MIB, timeout_seconds=5.0)
        other = MooncakeClient(master=server.master, timeout_seconds=5.0)
        until(lambda: ends_in_time(lambda: giver.put("t/1", [b"value"]), 5.0))
        until(lambda: ends_in_time(lambda: other.get_start("t/1", 5), 5.0))
        assert other.get_start("t/1", 5) == b"value"
        giver.close()
        until(lambda: not other.present(["t/1"])[0])
        other.close()
    finally:
        server.stop()


def test_store_with_a_metadata_server(tmp_path: Path) -> None:
    """The older way for peers to find each other."""
    with mooncake_server(tmp_path, is_http=True) as server:
        client = make_client(server)
        client.put("t/1", [b"value"])
        assert client.get_start("t/1", 5) == b"value"
        client.close()
