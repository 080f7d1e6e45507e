"""Memory that the client for Mooncake Store shares with its process: it comes, and it goes."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.engines.mooncake_server import (
    MooncakeServer,
    helper_of,
    helper_pids,
    make_client,
    until,
)

from opal_connector.tiers import allocate_host_rows
from opal_connector.tiers.base import Rows
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.mooncake import MooncakeClient
from opal_connector.tiers.engines.mooncake_process import StoreProcess

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def client(mooncake: MooncakeServer) -> Iterator[MooncakeClient]:
    client = make_client(mooncake)
    yield client
    client.close()


def filled(row_bytes: int, seed: int) -> Rows:
    rows = allocate_host_rows(row_count=1, row_bytes=row_bytes)
    rows[...] = np.random.default_rng(seed).integers(0, 256, rows.shape, np.uint8)
    return rows


def maps_of(pid: int) -> int:
    """Memory of ours that a process maps, in pieces."""
    return Path(f"/proc/{pid}/maps").read_text().count("/memfd:opal")


def test_memory_where_other_memory_was(client: MooncakeClient, mooncake: MooncakeServer) -> None:
    """Its own bytes are stored, and it gets its own: whoever had its addresses before is forgotten.

    The memory through which unshared bytes go grows, and the smaller one's place is free then.
    """
    for size in (64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB):
        client.put("t/small", [bytes(size)])
        client.put("t/large", [bytes(2 * size)])
        others = [filled(size, seed) for seed in range(8)]
        for rows in others:
            client.put("t/1", [rows.data])
            assert mooncake.raw_get("opal/t/1") == rows.tobytes()
        for rows in others:
            client.get("t/small", size, [Span(0, [rows.data.cast("B")])])
            assert not rows.any()


def test_prepared_memory_where_prepared_memory_was(
    client: MooncakeClient, mooncake: MooncakeServer
) -> None:
    """The same for memory of threads that have ended."""
    places = set()
    for seed in range(20):
        rows = filled(MIB, seed)
        client.prepare(rows)
        client.put("t/1", [rows.data])
        assert mooncake.raw_get("opal/t/1") == rows.tobytes()
        places.add(rows.__array_interface__["data"][0])
        del rows
    assert len(places) < 20


def test_memory_of_threads_that_ended_is_given_back(client: MooncakeClient) -> None:
    """Nothing keeps it: not the client, and not its process."""
    pid = helper_of(client)

    def work() -> None:
        rows = filled(4 * MIB, 1)
        client.prepare(rows)
        client.put("t/1", [rows.data])

    def live_and_end() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    live_and_end()
    maps, files = maps_of(pid), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        live_and_end()
    client.present(["t/1"])
    assert maps_of(pid) <= maps
    assert len(os.listdir("/proc/self/fd")) <= files
    assert len(client._memories) == 0


def test_memory_that_the_process_cannot_map_is_copied(client: MooncakeClient) -> None:
    """Values go through other memory then, and no call fails."""
    client.put("t/1", [b"value"])
    pid = helper_of(client)
    status = Path(f"/proc/{pid}/status").read_text()
    used_bytes = int(status.partition("VmSize:")[2].split()[0]) * KIB
    resource.prlimit(pid, resource.RLIMIT_AS, (used_bytes + 64 * MIB, resource.RLIM_INFINITY))
    rows = allocate_host_rows(row_count=1024, row_bytes=MIB)
    rows[:2] = np.random.default_rng(1).integers(0, 256, (2, MIB), np.uint8)
    client.prepare(rows)
    for _ in range(2):
        client.put("t/2", [rows[0].data])
        client.get("t/2", MIB, [Span(0, [rows[1].data])])
        assert np.array_equal(rows[0], rows[1])
    assert helper_of(client) == pid


def test_process_that_is_not_ready_in_the_end_is_ended(
    mooncake: MooncakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that reached its store and failed then is left to nobody."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no memory")

    before, rows = helper_pids(), filled(4096, 1)
    with monkeypatch.context() as patched:
        patched.setattr(StoreProcess, "keep_up", fail)
        client = MooncakeClient(master=mooncake.master, timeout_seconds=20.0)
        client.prepare(rows)
        with pytest.raises(OSError, match="no memory"):
            client.present(["t/1"])
        until(lambda: helper_pids() == before)
    assert client.present(["t/none"]) == [False]
    client.close()
