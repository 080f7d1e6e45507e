"""What a client for object stores says and how long it takes when the endpoint is not well."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from integration.engines.object_store_server import BUCKET, SECRET_KEY, ObjectStoreServer

from opal_connector.cli.server_process import free_port
from opal_connector.config import ConfigError
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.object_store import ObjectStoreClient
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError

TIMEOUT_SECONDS = 1.0
# The calls end in time; what this machine adds when it is busy is no fault of theirs.
BUSY_SECONDS = 2.0
PART_BYTES = 5 << 20
LARGE = bytes(4 * PART_BYTES)
Call = Callable[[ObjectStoreClient], object]


def get(client: ObjectStoreClient, size: int) -> None:
    client.get("ns/r0/a", size, [Span(0, [memoryview(bytearray(size))])])


CALLS: dict[str, Call] = {
    "put": lambda client: client.put("ns/r0/a", [b"value"]),
    "put_in_parts": lambda client: client.put("ns/r0/a", [LARGE]),
    "get": lambda client: get(client, 100),
    "get_in_parts": lambda client: get(client, len(LARGE)),
    "get_start": lambda client: client.get_start("ns/r0/a", 10),
    "get_starts": lambda client: client.get_starts([f"ns/r0/{n}" for n in range(100)], 10),
    "present_one": lambda client: client.present(["ns/r0/a"]),
    "present_some": lambda client: client.present([f"ns/r0/{n}" for n in range(100)]),
    "present_many": lambda client: client.present([f"ns/r0/{n}" for n in range(1000)]),
    "remove": lambda client: client.remove(["ns/r0/a"]),
    "remove_under": lambda client: client.remove_under("ns/r0/"),
    "list": lambda client: list(client.list_values("ns/r0/")),
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer()
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()


def make_client(
    options: dict[str, str],
    url: str = f"s3://{BUCKET}/p",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> ObjectStoreClient:
    return ObjectStoreClient(
        url, options=options, timeout_seconds=timeout_seconds, part_bytes=PART_BYTES
    )


def fault_of(call: Call, client: ObjectStoreClient) -> OSError:
    """What the call raised, within its time, in one sentence without a secret."""
    began = time.monotonic()
    with pytest.raises(OSError, match=r"s3://") as caught:
        call(client)
    assert time.monotonic() - began < TIMEOUT_SECONDS + BUSY_SECONDS
    told = str(caught.value)
    assert SECRET_KEY not in told
    assert "\n" not in told
    return caught.value


def test_a_paused_endpoint_costs_a_call_its_timeout_and_no_more(server: ObjectStoreServer) -> None:
    """Every call, all at once, each with a client of its own."""
    clients = {name: make_client(server.options) for name in CALLS}
    server.pause()
    try:
        with ThreadPoolExecutor(len(CALLS)) as pool:
            faults = {
                name: pool.submit(fault_of, call, clients[name]) for name, call in CALLS.items()
            }
    finally:
        server.resume()
    assert {name: type(fault.result()) for name, fault in faults.items()} == dict.fromkeys(
        CALLS, TimeoutError
    )
    for client in clients.values():
        client.close()


@every_call
def test_an_endpoint_that_nobody_serves_is_a_fault_at_once(call: Call) -> None:
    options = {"aws_endpoint": f"http://127.0.0.1:{free_port()}", **credentials()}
    client = make_client(options)
    assert isinstance(fault_of(call, client), ConnectionError)
    client.close()


@every_call
def test_a_bucket_that_does_not_exist_is_no_miss(server: ObjectStoreServer, call: Call) -> None:
    client = make_client(server.options, "s3://nobody-made-this/p")
    assert "no bucket at s3://nobody-made-this" in str(fault_of(call, client))
    client.close()


def test_wrong_credentials_are_refused_and_not_told() -> None:
    server = ObjectStoreServer(checks_credentials=True)
    server.start()
    try:
        server.make_bucket()
        client = make_client(server.options)
        for call in CALLS.values():
            fault = fault_of(call, client)
            assert isinstance(fault, PermissionError)
            assert BUCKET in str(fault)
        client.close()
    finally:
        server.stop()


def test_a_client_finds_an_endpoint_that_came_back_by_itself() -> None:
    server = ObjectStoreServer()
    server.start()
    try:
        server.make_bucket()
        client = make_client(server.options)
        client.put("ns/r0/a", [b"value"])
        server.restart(empty=False)
        assert client.present(["ns/r0/a"]) == [True]
        assert client.get_start("ns/r0/a", 10) == b"value"
        server.stop()
        fault_of(CALLS["get_start"], client)
        server.start()
        server.make_bucket()
        assert client.present(["ns/r0/a"]) == [False]
        client.put("ns/r0/a", [b"value"])
        client.close()
    finally:
        server.stop()


class Answering:
    """An endpoint that gives every request the same answer, as slowly as it is told."""

    def __init__(self, head: bytes, body: bytes = b"", pause_seconds: float = 0.0) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._head, self._body, self._pause_seconds = head, body, pause_seconds
        self._ended = threading.Event()
        self.heard: list[bytes] = []
        self.options = {
            "aws_endpoint": f"http://127.0.0.1:{self._listener.getsockname()[1]}",
            **credentials(),
        }
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(TIMEOUT_SECONDS)
            try:
                self.heard.append(connection.recv(1 << 16))
                connection.sendall(self._head)
                for byte in self._body:
                    connection.sendall(bytes([byte]))
                    if self._ended.wait(self._pause_seconds):
                        return
            except OSError:
                return  # the client has given up


def credentials() -> dict[str, str]:
    return {"aws_access_key_id": "somebody", "aws_secret_access_key": SECRET_KEY}


def status(line: str, body: str = "") -> bytes:
    head = f"HTTP/1.1 {line}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()


@every_call
@pytest.mark.parametrize("line", ["503 Slow Down", "500 Internal Server Error"])
def test_a_storm_of_errors_ends_in_time(line: str, call: Call) -> None:
    endpoint = Answering(status(line))
    client = make_client(endpoint.options)
    try:
        fault = fault_of(call, client)
        assert line[:3] in str(fault)
    finally:
        client.close()
        endpoint.close()


def test_a_store_that_is_busy_is_asked_again() -> None:
    endpoint = Answering(status("503 Slow Down"))
    client = make_client(endpoint.options, timeout_seconds=30.0)
    try:
        with pytest.raises(OSError, match="503"):
            client.put("ns/r0/a", [b"value"])
        assert len(endpoint.heard) > 1
    finally:
        client.close()
        endpoint.close()


def test_connections_that_are_reset_end_in_time() -> None:
    endpoint = Answering(b"")
    client = make_client(endpoint.options)
    try:
        for call in CALLS.values():
            fault_of(call, client)
    finally:
        client.close()
        endpoint.close()


def test_a_body_that_trickles_ends_in_time() -> None:
    """Progress is not enough: bytes that come too late are of no use."""
    head = status("200 OK").replace(b"Content-Length: 0", b"Content-Length: 100")
    head = head.replace(b"\r\n\r\n", b'\r\nETag: "a"\r\n\r\n')
    head = head.replace(b"\r\nETag", b"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nETag")
    head = head.replace(b"200 OK", b"206 Partial Content\r\nContent-Range: bytes 0-99/100")
    endpoint = Answering(head, bytes(100), pause_seconds=0.1)
    client = make_client(endpoint.options)
    try:
        assert isinstance(fault_of(CALLS["get"], client), TimeoutError)
    finally:
        client.close()
        endpoint.close()


@pytest.mark.parametrize(
    "answer",
    [
        status("507 Insufficient Storage"),
        status("403 Forbidden", "<Error><Code>QuotaExceeded</Code></Error>"),
        status("400 Bad Request", "<Error><Code>XMinioStorageFull</Code></Error>"),
    ],
)
def test_a_full_store_is_told_from_one_that_fails(answer: bytes) -> None:
    endpoint = Answering(answer)
    client = make_client(endpoint.options)
    try:
        assert isinstance(fault_of(CALLS["put"], client), NoSpaceError)
    finally:
        client.close()
        endpoint.close()


def test_constructing_connects_to_nothing_and_close_needs_no_connection() -> None:
    make_client({"aws_endpoint": "http://192.0.2.1:9", **credentials()}).close()


def test_the_profile_that_the_environment_names_gives_the_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text(
        f"[kept]\naws_access_key_id = OFTHEPROFILE\naws_secret_access_key = {SECRET_KEY}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "kept")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    endpoint = Answering(status("404 Not Found"))
    client = make_client({"aws_endpoint": endpoint.options["aws_endpoint"]})
    try:
        with pytest.raises(ObjectGoneError):
            client.get_start("ns/r0/a", 1)
        assert b"Credential=OFTHEPROFILE/" in endpoint.heard[0]
    finally:
        client.close()
        endpoint.close()
    monkeypatch.setenv("AWS_PROFILE", "not-there")
    with pytest.raises(ConfigError, match="AWS_PROFILE: found 'not-there'"):
        make_client({})


def test_an_azure_account_that_is_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match="azure_storage_account_name"):
        make_client({}, "az://container/p")


@pytest.mark.parametrize("name", ["aws_bogus", "timeout", "aws_timeout"])
def test_an_option_that_does_not_exist_or_is_ours_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"ObjectStore\.options: .*{name}") as caught:
        make_client({name: "10s"})
    assert "\n" not in str(caught.value)


def test_without_the_library_one_sentence_says_which_extra_has_it() -> None:
    script = (
        "import sys; sys.modules['obstore'] = None\n"
        "from opal_connector.tiers.engines.object_store import ObjectStoreClient\n"
        "try: ObjectStoreClient('s3://b/p', timeout_seconds=1)\n"
        "except ValueError as error: print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip().endswith("pip install 'opal-connector[object-store]'")
