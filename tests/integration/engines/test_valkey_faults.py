"""What `ValkeyClient` and its tier do when the server is paused, slow, full, gone, or refuses."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from valkey_server import ScriptedServer, ValkeyServer, trickling, valkey_server

from opal_connector.tiers.checks import row_check
from opal_connector.tiers.cpu_memory import allocate_host_rows
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.engine_tier import EngineTier
from opal_connector.tiers.engines.valkey import ValkeyClient
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError
from opal_connector.transfers import ObjectName

MEBIBYTE = 1 << 20
TIMEOUT_SECONDS = 1.0
SLACK_SECONDS = 4.0  # for a busy machine; what these tests guard against lasts for ever
PATIENCE_SECONDS = 20.0

Call = Callable[[ValkeyClient], object]
CALLS: dict[str, Call] = {
    "put": lambda client: client.put("k", [bytes(64)]),
    "large put": lambda client: client.put("k", [bytes(128 * MEBIBYTE)]),
    "get": lambda client: client.get("k", 64, [Span(0, [memoryview(bytearray(64))])]),
    "part": lambda client: client.get("k", 64, [Span(9, [memoryview(bytearray(5))])]),
    "start": lambda client: client.get_start("k", 10),
    "starts": lambda client: client.get_starts(["k", "l"], 10),
    "present": lambda client: client.present(["k", "l"]),
    "remove": lambda client: client.remove(["k"]),
    "remove under": lambda client: client.remove_under("k/"),
    "list": lambda client: list(client.list_values("k/")),
    "touch": lambda client: client.touch(["k"]),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path) as running:
        yield running


def quick(url: str) -> ValkeyClient:
    return ValkeyClient(url, timeout_seconds=TIMEOUT_SECONDS, ttl_seconds=1000.0)


def whole(client: ValkeyClient, key: str, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    client.get(key, size_bytes, [Span(0, [memoryview(data)])])
    return bytes(data)


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ---- time ----


@pytest.mark.parametrize("is_connected", [False, True])
def test_every_call_ends_in_time_while_the_server_stands_still(
    server: ValkeyServer, is_connected: bool
) -> None:
    """With a connection from before, and without; and all is well when the server goes on."""
    client = quick(server.url)
    if is_connected:
        client.present(["k"])
    server.pause()

    def ends_in_time(call: Call) -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            call(client)
        assert time.monotonic() - began < TIMEOUT_SECONDS + SLACK_SECONDS

    with ThreadPoolExecutor(len(CALLS)) as pool:
        outcomes = {name: pool.submit(ends_in_time, call) for name, call in CALLS.items()}
    server.resume()
    assert {name: outcome.exception() for name, outcome in outcomes.items()} == dict.fromkeys(CALLS)
    patient = ValkeyClient(server.url, timeout_seconds=PATIENCE_SECONDS)
    patient.put("other", [b"yes"])
    client.close()
    assert whole(patient, "other", 3) == b"yes"
    patient.close()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("put", b"+"),
        ("get", b"$64\r\n"),
        ("part", b":1\r\n:64\r\n$5\r\n"),
        ("start", b":1\r\n$10"),
        ("present", b"+"),
        ("remove", b"+"),
        ("list", b"+"),
        ("touch", b"+"),
    ],
)
def test_a_server_that_trickles_is_given_up_in_time(name: str, start: bytes) -> None:
    """Every byte is progress, and yet the call ends."""
    with ScriptedServer(trickling(start)) as slow:
        client = ValkeyClient(slow.url, timeout_seconds=0.3, ttl_seconds=1000.0)
        began = time.monotonic()
        with pytest.raises(OSError, match=r"did not answer in time|does not speak RESP|other size"):
            CALLS[name](client)
        assert time.monotonic() - began < 0.3 + SLACK_SECONDS
        client.close()


def test_a_handshake_that_trickles_is_given_up_in_time() -> None:
    """So is a server that never ends its answer to a password."""
    with ScriptedServer(trickling(b"+")) as slow:
        url = slow.url.replace("redis://", "redis://:geheim@")
        client = ValkeyClient(url, timeout_seconds=0.3)
        began = time.monotonic()
        with pytest.raises(TimeoutError) as caught:
            client.present(["k"])
        assert time.monotonic() - began < 0.3 + SLACK_SECONDS
        assert "geheim" not in str(caught.value)


def test_waiting_for_a_connection_ends_in_time(server: ValkeyServer) -> None:
    """Where others use up all connections, a call does not wait longer than for the server."""
    client = ValkeyClient(server.url, timeout_seconds=TIMEOUT_SECONDS, connections=1)
    server.pause()
    took: list[float] = []

    def ask() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.present(["k"])
        took.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 4
    assert max(took) < TIMEOUT_SECONDS + SLACK_SECONDS
    client.close()


def test_an_answer_that_came_too_late_is_nobody_elses(server: ValkeyServer) -> None:
    """The connection of a call that was given up is not used again."""
    client = quick(server.url)
    client.put("late", [b"l" * 64])
    client.put("next", [b"n" * 64])
    server.pause()
    with pytest.raises(TimeoutError):
        whole(client, "late", 64)
    server.resume()
    for _ in range(5):
        assert whole(client, "next", 64) == b"n" * 64
    client.close()


# ---- writes without an answer ----


def test_a_write_that_the_server_carries_out_late_is_taken_back(server: ValkeyServer) -> None:
    """Paused, given up, resumed: after the tier's probe the value is not there and stays away."""
    row_bytes = 64 << 10
    tier = EngineTier("Valkey", quick(server.url), row_bytes=row_bytes, rank=0)
    list(tier.open(bytes(32)))
    rows = allocate_host_rows(row_count=4, row_bytes=row_bytes)
    rows[:] = np.arange(row_bytes, dtype=np.uint8)
    name = ObjectName(0, bytes(32), b"".join(bytes([number]) * 32 for number in range(4)))
    checks = [row_check(rows[number], name.stamps, number) for number in range(4)]
    tier.probe()  # a connection is there
    server.pause()
    with pytest.raises(TimeoutError):
        tier.write_object(name, rows, range(4), checks)
    server.resume()
    eventually(lambda: is_well(tier))
    assert server.command("KEYS", "*") == []
    tier.write_object(name, rows, range(4), checks)
    into = allocate_host_rows(row_count=4, row_bytes=row_bytes)
    assert tier.read_object(name, range(4), into, range(4)) == checks
    assert np.array_equal(rows, into)
    tier.close()


@pytest.mark.parametrize(("way", "size"), [("tcp", 64), ("tcp", 100_000), ("unix", 64)])
def test_a_client_that_is_closed_before_the_server_goes_on_leaves_nothing(
    server: ValkeyServer, way: str, size: int
) -> None:
    """The removal lies behind the write in the server's own buffers."""
    url = server.url if way == "tcp" else f"unix://{server.socket_path}"
    client = ValkeyClient(url, timeout_seconds=0.3)
    client.put("before", [b"x"])  # a connection is there
    writes = server.command("INFO", "commandstats")["cmdstat_set"]["calls"]
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            client.put("late", [bytes(size)])
        client.close()
    finally:
        server.resume()
    eventually(lambda: server.command("INFO", "commandstats")["cmdstat_set"]["calls"] > writes)
    eventually(lambda: not server.has("opal:late"))
    assert server.has("opal:before")


def is_well(tier: EngineTier) -> bool:
    try:
        tier.probe()
    except OSError:
        return False
    return True


def test_a_key_is_not_removed_before_the_write_that_came_first_is_over() -> None:
    """The server gets no removal while it may still carry out the write, on another connection."""
    may_end = threading.Event()
    seen: list[bytes] = []

    def script(connection: socket.socket) -> None:
        is_writer = False  # there the removal comes behind the write
        while data := connection.recv(1 << 16):
            is_writer = is_writer or b"SET" in data
            if not is_writer:
                seen.append(data)
                connection.sendall(b":1\r\n")
        may_end.wait(PATIENCE_SECONDS)
        connection.close()

    with ScriptedServer(script) as server:
        client = ValkeyClient(server.url, timeout_seconds=0.3)
        with pytest.raises(TimeoutError):
            client.put("doubtful", [b"x" * 1000])
        for remove in (lambda: client.remove(["doubtful"]), lambda: client.remove_under("d")):
            with pytest.raises(TimeoutError):
                remove()
        client.remove(["another"])  # does not wait
        assert not any(b"UNLINK" in data and b"doubtful" in data for data in seen)
        may_end.set()
        patient_until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < patient_until:
            try:
                client.remove(["doubtful"])
                break
            except TimeoutError:
                continue
        assert any(b"UNLINK" in data and b"doubtful" in data for data in seen)
        client.close()


# ---- memory ----


def test_a_full_server_that_may_evict_nothing_is_full_and_readable(tmp_path: Path) -> None:
    """`NoSpaceError`; what is stored stays, and there is room again after a removal."""
    with valkey_server(tmp_path, maxmemory="12mb") as server:
        client = ValkeyClient(server.url, timeout_seconds=PATIENCE_SECONDS)
        stored = 0
        while stored < 100 and fits(client, f"k{stored}", stored):
            stored += 1
        assert 5 < stored < 15
        for number in range(stored):
            assert whole(client, f"k{number}", MEBIBYTE) == bytes([number]) * MEBIBYTE
        assert client.present([f"k{stored}"]) == [False]
        client.remove([f"k{number}" for number in range(4)])
        # Memory is given back by a thread of the server.
        eventually(lambda: fits(client, "again", 0))
        client.close()


def fits(client: ValkeyClient, key: str, letter: int) -> bool:
    try:
        client.put(key, [bytes([letter]) * MEBIBYTE])
    except NoSpaceError:
        return False
    return True


def test_what_the_server_evicts_is_gone(tmp_path: Path) -> None:
    """With an eviction policy everything fits, and the oldest values are honest misses."""
    with valkey_server(tmp_path, maxmemory="12mb", policy="allkeys-lru") as server:
        client = ValkeyClient(server.url, timeout_seconds=PATIENCE_SECONDS)
        keys = [f"k/{number}" for number in range(40)]
        for number, key in enumerate(keys):
            client.put(key, [bytes([number]) * MEBIBYTE])
        found = client.present(keys)
        assert 1 <= sum(found) < 15
        listed = {value.key for page in client.list_values("k/") for value in page}
        assert listed == {key for key, is_there in zip(keys, found, strict=True) if is_there}
        for number, key in enumerate(keys):
            if found[number]:
                assert whole(client, key, MEBIBYTE) == bytes([number]) * MEBIBYTE
            else:
                with pytest.raises(ObjectGoneError):
                    whole(client, key, MEBIBYTE)
        client.close()


# ---- restarts ----


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_restarted_server_is_found_again_by_the_next_call(tmp_path: Path, is_empty: bool) -> None:
    """Connections from before are replaced without an error; what the server kept is there."""
    with valkey_server(tmp_path, appendonly=True, options=["--appendfsync", "always"]) as server:
        client = ValkeyClient(server.url, timeout_seconds=PATIENCE_SECONDS)
        client.put("kept", [b"v" * 100])
        server.restart(empty=is_empty)
        assert client.present(["kept"]) == [not is_empty]
        client.put("new", [b"w"])
        assert whole(client, "new", 1) == b"w"
        server.stop()
        with pytest.raises(ConnectionError):
            client.present(["kept"])
        client.close()


def test_a_server_that_ends_in_the_middle_is_an_error_of_the_system() -> None:
    """Half an answer is never a value."""

    def script(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"$64\r\nhalf")
        connection.close()

    with ScriptedServer(script) as server:
        client = quick(server.url)
        with pytest.raises(ConnectionError):
            whole(client, "k", 64)
        client.close()
