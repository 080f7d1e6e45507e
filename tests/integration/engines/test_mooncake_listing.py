"""What a Mooncake Store holds, from its master's admin port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from integration.engines.mooncake_server import MooncakeServer, wait_until_ready

from opal_connector.cli.server_process import free_port
from opal_connector.config import MooncakeConfig
from opal_connector.tiers.engines.build import make_engine_client
from opal_connector.tiers.engines.mooncake_listing import ListingMooncakeClient

TIMEOUT_SECONDS = 2.0


def client_of(mooncake: MooncakeServer, admin: str) -> ListingMooncakeClient:
    """As settings of a user make it."""
    settings = MooncakeConfig(
        master=mooncake.master,
        metadata=mooncake.metadata,
        admin=admin,
        timeout_seconds=TIMEOUT_SECONDS / 0.8,
    )
    client = make_engine_client("Mooncake", settings)
    assert isinstance(client, ListingMooncakeClient)
    return client


def listed(client: ListingMooncakeClient, prefix: str) -> set[str]:
    return {value.key for page in client.list_values(prefix) for value in page}


@contextmanager
def answering(answer: bytes, *, pause_seconds: float = 0.0) -> Iterator[str]:
    """A server that says this to everybody, a byte at a time if there are pauses."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                try:
                    if not pause_seconds:
                        connection.sendall(answer)
                        return
                    for byte in answer:
                        connection.sendall(bytes([byte]))
                        time.sleep(pause_seconds)  # a slow server is what is asked for
                except OSError:
                    pass  # whoever asked had enough

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_listing_leases_nothing(mooncake: MooncakeServer) -> None:
    """What is only listed can be evicted; values of others, and unfinished ones, are not told."""
    client = client_of(mooncake, mooncake.admin)
    wait_until_ready(client)
    client.remove_under("t/")
    client.put("t/1", [b"v"])
    client.put("t/2", [b"v"])
    mooncake.raw_put("other/t/1", b"v")
    assert mooncake.raw_start_put("opal/t/begun", 10) == 0
    assert listed(client, "t/") == {"t/1", "t/2"}
    assert mooncake.raw_remove_unforced("opal/t/1") == 0
    assert listed(client, "t/") == {"t/2"}
    client.close()


def test_fault_of_the_admin_port_is_an_os_error(mooncake: MooncakeServer) -> None:
    """Nobody there, not this kind of server, an answer that stops: each within the time."""
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + 1000 * b"k\n"
    for answer, complaint in (
        (b"", "closed connection"),
        (b"what?\r\n\r\n", "is broken"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "HTTP 404"),
        (half, "ends in the middle"),
    ):
        with answering(answer) as admin:
            client = client_of(mooncake, admin)
            with pytest.raises(OSError, match=complaint):
                listed(client, "t/")
            client.close()
    client = client_of(mooncake, f"127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionRefusedError):
        listed(client, "t/")
    client.close()


def test_slow_admin_port(mooncake: MooncakeServer) -> None:
    """One that never stops is given up in time."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + 1000 * b"k\n"
    with answering(answer, pause_seconds=0.02) as admin:
        client = client_of(mooncake, admin)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            listed(client, "t/")
        assert time.monotonic() - began < TIMEOUT_SECONDS + 1.5
        client.close()
