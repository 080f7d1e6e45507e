"""What `ValkeyClient` does in many round trips: each has the timeout, and each is progress."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from valkey_server import ScriptedServer, ValkeyServer, valkey_server

from opal_connector.tiers.engines.valkey import ValkeyClient

TIMEOUT_SECONDS = 1.0
PAGE_SECONDS = 0.2
PAGES = 8
PATIENCE_SECONDS = 20.0


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> ValkeyServer:
    shared_server.command("FLUSHALL")
    return shared_server


class LargeDatabase:
    """A script: a scan of `PAGES` pages with one key each, all of them slow; the last may hang.

    Mutable state: the keys whose removal was asked for.
    """

    def __init__(self, *, hangs_at: int | None = None) -> None:
        self.removed: list[bytes] = []
        self._hangs_at = hangs_at
        self._pause = threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        for words in commands_of(connection):
            match words:
                case [b"SCAN", cursor, *_]:
                    page = int(cursor)
                    if page == self._hangs_at:
                        self._pause.wait(PATIENCE_SECONDS)
                        return
                    self._pause.wait(PAGE_SECONDS)
                    following = b"%d" % ((page + 1) % PAGES)
                    connection.sendall(
                        b"*2\r\n$%d\r\n%b\r\n*1\r\n$10\r\nopal:n/k%02d\r\n"
                        % (len(following), following, page)
                    )
                case [b"UNLINK", *names]:
                    self.removed += names
                    connection.sendall(b":%d\r\n" % len(names))
                case _:
                    connection.sendall(b":1\r\n")

    def release(self) -> None:
        self._pause.set()


def commands_of(connection: socket.socket) -> Iterator[list[bytes]]:
    """The commands that come over a connection, until it ends."""
    import hiredis

    reader = hiredis.Reader(notEnoughData=Ellipsis)
    while data := connection.recv(1 << 16):
        reader.feed(data)
        while (words := reader.gets()) is not Ellipsis:
            yield words


@pytest.mark.parametrize(
    "call",
    [lambda client: client.remove_under("n/"), lambda client: list(client.list_values("n/"))],
    ids=["wipe", "list"],
)
def test_a_database_that_takes_longer_than_the_timeout_is_gone_through(
    call: Callable[[ValkeyClient], object],
) -> None:
    """All pages of it together do; each alone does not."""
    with ScriptedServer(LargeDatabase()) as large:
        client = ValkeyClient(large.url, timeout_seconds=TIMEOUT_SECONDS)
        assert PAGES * PAGE_SECONDS > TIMEOUT_SECONDS
        call(client)
        client.close()


def test_a_wipe_that_fails_in_the_middle_has_removed_what_it_found() -> None:
    """The next one has less to do."""
    database = LargeDatabase(hangs_at=3)
    with ScriptedServer(database) as large:
        client = ValkeyClient(large.url, timeout_seconds=TIMEOUT_SECONDS)
        with pytest.raises(TimeoutError):
            client.remove_under("n/")
        assert database.removed == [b"opal:n/k00", b"opal:n/k01", b"opal:n/k02"]
        database.release()
        client.close()


def test_the_starts_of_many_values_come_in_few_round_trips(server: ValkeyServer) -> None:
    """Each for its key; None for those that are not there, also where something else is."""
    client = ValkeyClient(server.url, timeout_seconds=PATIENCE_SECONDS)
    server.fill({f"opal:k{number}": f"{number}-" * 3 for number in range(0, 700, 3)})
    server.fill({"opal:empty": ""})
    server.command("RPUSH", "opal:list", "not a value")
    client.present(["k0"])
    before = server.command("INFO", "stats")["total_reads_processed"]
    found = client.get_starts([*(f"k{number}" for number in range(700)), "empty", "list"], 5)
    after = server.command("INFO", "stats")["total_reads_processed"]
    expected = [(f"{number}-" * 3).encode()[:5] for number in range(700)]
    assert found[:700] == [
        start if number % 3 == 0 else None for number, start in enumerate(expected)
    ]
    assert found[700:] == [b"", None]
    assert after - before < 20
    assert client.get_starts([], 5) == []
    assert client.get_starts(["k0"], 0) == [b""]
    client.close()


def test_starts_from_a_server_that_stands_still_end_in_time(server: ValkeyServer) -> None:
    """All of them within one timeout."""
    client = ValkeyClient(server.url, timeout_seconds=0.3)
    server.pause()
    try:
        with pytest.raises(TimeoutError):
            client.get_starts([f"k{number}" for number in range(1000)], 4096)
    finally:
        server.resume()
    client.close()


def test_starts_from_a_server_without_them_are_an_error_of_the_system(tmp_path: Path) -> None:
    """Nobody there is no miss."""
    client = ValkeyClient(f"unix://{tmp_path}/nobody", timeout_seconds=5.0)
    with pytest.raises(ConnectionError):
        client.get_starts(["x"], 10)
    client.close()
