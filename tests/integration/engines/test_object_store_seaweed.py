"""The client for object stores against a second S3 server, SeaweedFS."""

import random
import time
from collections.abc import Callable, Iterator

import pytest
from integration.engines.object_store_server import BUCKET
from integration.engines.seaweed_server import SeaweedServer

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.object_store import ObjectStoreClient
from opal_connector.tiers.file_errors import ObjectGoneError

PART_BYTES = 5 << 20
TIMEOUT_SECONDS = 1.0
WATCHED_SECONDS = 0.5  # with a single DELETE a value is back within a tenth of that
PATIENCE_SECONDS = 40.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(directory=tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server: SeaweedServer) -> Iterator[ObjectStoreClient]:
    client = make_client(server, timeout_seconds=60.0)
    yield client
    client.close()


def make_client(server: SeaweedServer, timeout_seconds: float) -> ObjectStoreClient:
    return ObjectStoreClient(
        f"s3://{BUCKET}/some/prefix",
        options=server.options,
        timeout_seconds=timeout_seconds,
        part_bytes=PART_BYTES,
    )


@pytest.mark.parametrize("size", [4096, 4 * PART_BYTES + 17])
def test_values_go_there_and_come_back_in_ranges(client: ObjectStoreClient, size: int) -> None:
    """In one request and in several, both ways."""
    value = random.Random(size).randbytes(size)
    client.put("ns/r0/a", [value[:1000], value[1000:]])
    whole = bytearray(size)
    client.get("ns/r0/a", size, [Span(0, [memoryview(whole)])])
    assert whole == value
    first, last = bytearray(10), bytearray(20)
    client.get("ns/r0/a", size, [Span(5, [memoryview(first)]), Span(size - 20, [memoryview(last)])])
    assert (first, last) == (value[5:15], value[-20:])
    with pytest.raises(ChecksumMismatchError):
        client.get("ns/r0/a", size + 100, [Span(size + 50, [memoryview(first)])])


def test_values_are_found_listed_and_removed(client: ObjectStoreClient) -> None:
    keys = [f"ns/r1/{number}" for number in range(20)]
    for key in keys:
        client.put(key, [key.encode()])
    assert client.present(["ns/r1/none", *keys]) == [False] + [True] * 20
    listed = [value for page in client.list_values("ns/r1/") for value in page]
    assert sorted(value.key for value in listed) == sorted(keys)
    client.remove([keys[0], "ns/r1/none"])
    with pytest.raises(ObjectGoneError):
        client.get_start(keys[0], 1)
    client.remove_under("ns/r1/")
    assert [value for page in client.list_values("ns/r1/") for value in page] == []


@pytest.mark.parametrize("way", ["by-name", "by-prefix"])
def test_what_was_taken_back_stays_away(
    server: SeaweedServer, client: ObjectStoreClient, way: str
) -> None:
    """A PUT that the server carries out after it stood still comes after the DELETE, often.

    The value fits the buffers of a connection: it is sent whole to a server that does not read.
    """
    hasty = make_client(server, TIMEOUT_SECONDS)
    keys = [f"{way}/{number}" for number in range(2)]
    for key in keys:
        server.pause()
        try:
            with pytest.raises(TimeoutError):
                hasty.put(key, [bytes(1 << 20)])
        finally:
            server.resume()
        if way == "by-name":
            repeated(lambda key=key: hasty.remove([key]))  # type: ignore[misc]
        else:
            repeated(lambda: hasty.remove_under(f"{way}/"))
        until = time.monotonic() + WATCHED_SECONDS
        while time.monotonic() < until:
            assert client.present([key]) == [False]
    client.put(keys[0], [b"new"])
    assert client.present(keys) == [True, False]
    hasty.close()


def repeated(call: Callable[[], None]) -> None:
    """Call until there is no error, as a tier's probe does it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return call()
        except OSError:
            assert time.monotonic() < deadline, "the server never came back"
