"""The client for object stores against a real S3 endpoint: every promise of `EngineClient`."""

import random
import threading
from collections.abc import Iterator

import pytest
from integration.engines.object_store_server import BUCKET, ObjectStoreServer

from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.object_store import ObjectStoreClient
from opal_connector.tiers.file_errors import ObjectGoneError

PREFIX = "some/prefix"
PART_BYTES = 5 << 20  # the least that S3 takes as a part
TIMEOUT_SECONDS = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer()
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()


@pytest.fixture
def client(server: ObjectStoreServer) -> Iterator[ObjectStoreClient]:
    server.raw_clear()
    client = make_client(server)
    yield client
    client.close()


def make_client(server: ObjectStoreServer, **given: object) -> ObjectStoreClient:
    settings = {
        "url": f"s3://{BUCKET}/{PREFIX}",
        "options": server.options,
        "timeout_seconds": TIMEOUT_SECONDS,
        "part_bytes": PART_BYTES,
        **given,
    }
    return ObjectStoreClient(**settings)  # type: ignore[arg-type]


def read(client: ObjectStoreClient, key: str, size: int, *ranges: tuple[int, int]) -> list[bytes]:
    """What these ranges, begin and end, of a value hold; all of it without any."""
    wanted = ranges or ((0, size),)
    buffers = [bytearray(end - begin) for begin, end in wanted]
    spans = [
        Span(begin, [memoryview(buffer)])
        for (begin, _), buffer in zip(wanted, buffers, strict=True)
    ]
    client.get(key, size, spans)
    return [bytes(buffer) for buffer in buffers]


def test_what_was_put_is_an_object_under_the_prefix_of_the_url(
    server: ObjectStoreServer, client: ObjectStoreClient
) -> None:
    client.put("ns/r0/a", [b"12", memoryview(bytearray(b"345")), b"", b"6"])
    assert server.raw_list() == [f"{PREFIX}/ns/r0/a"]
    assert server.raw_get(f"{PREFIX}/ns/r0/a") == b"123456"


def test_a_put_replaces_what_is_there(client: ObjectStoreClient) -> None:
    client.put("ns/r0/a", [b"a longer value"])
    client.put("ns/r0/a", [b"short"])
    assert read(client, "ns/r0/a", 5) == [b"short"]


@pytest.mark.parametrize("size", [1, 4096, PART_BYTES, 4 * PART_BYTES + 17])
def test_a_value_comes_back_into_scattered_buffers_whatever_its_size(
    client: ObjectStoreClient, server: ObjectStoreServer, size: int
) -> None:
    value = random.Random(size).randbytes(size)
    step = max(1, size // 7)
    client.put("ns/r0/a", [value[at : at + step] for at in range(0, size, step)])
    buffers = [bytearray(min(step + 3, size - at)) for at in range(0, size, step + 3)]
    client.get("ns/r0/a", size, [Span(0, [memoryview(buffer) for buffer in buffers])])
    assert b"".join(buffers) == value
    assert server.open_uploads() == 0


def test_only_the_ranges_that_are_wanted_are_written(client: ObjectStoreClient) -> None:
    size = 3 * PART_BYTES
    value = random.Random(0).randbytes(size)
    client.put("ns/r0/a", [value])
    ranges = [(0, 10), (12, 4000), (PART_BYTES + 5, 2 * PART_BYTES + 7), (size - 3, size)]
    found = read(client, "ns/r0/a", size, *ranges)
    assert found == [value[begin:end] for begin, end in ranges]


@pytest.mark.parametrize("wanted", [[(0, 10)], [(0, 4), (5, 7)], [(0, 2)]])
def test_a_value_is_lent_from_its_beginning(
    client: ObjectStoreClient, wanted: list[tuple[int, int]]
) -> None:
    """In the memory that it came in, which nobody may write to and which lasts with the view."""
    client.put("ns/r0/a", [b"0123456789"])
    lent = client.lend("ns/r0/a", 10, wanted)
    client.put("ns/r0/a", [b"9876543210"])
    assert lent is not None
    assert lent == b"0123456789"[: wanted[-1][1]]
    assert lent.readonly
    with pytest.raises(ChecksumMismatchError):
        client.lend("ns/r0/a", 9, [(0, 9)])
    with pytest.raises(ChecksumMismatchError):
        client.lend("ns/r0/a", 30, [(0, 30)])
    with pytest.raises(ObjectGoneError):
        client.lend("ns/r0/none", 10, [(0, 10)])


@pytest.mark.parametrize("wanted", [[(0, 3 * PART_BYTES)], [(0, 5), (2 * PART_BYTES, 11 << 20)]])
def test_what_comes_in_several_requests_is_not_lent(
    client: ObjectStoreClient, server: ObjectStoreServer, wanted: list[tuple[int, int]]
) -> None:
    """Nothing is asked of the server then: what is not there is not missed."""
    server.stop()
    try:
        assert client.lend("ns/r0/none", 3 * PART_BYTES, wanted) is None
    finally:
        server.start()
        server.make_bucket()


@pytest.mark.parametrize("wrong_size", [9, 11])
@pytest.mark.parametrize("begin", [0, 4])
def test_a_value_of_another_size_is_another_value(
    client: ObjectStoreClient, wrong_size: int, begin: int
) -> None:
    client.put("ns/r0/a", [b"0123456789"])
    with pytest.raises(ChecksumMismatchError):
        read(client, "ns/r0/a", wrong_size, (begin, wrong_size))


def test_a_range_behind_the_end_of_a_shorter_value_is_no_fault_of_the_engine(
    client: ObjectStoreClient,
) -> None:
    client.put("ns/r0/a", [b"0123456789"])
    with pytest.raises(ChecksumMismatchError):
        read(client, "ns/r0/a", 30, (20, 30))


def test_a_large_value_of_another_size_is_found_out_in_parts(client: ObjectStoreClient) -> None:
    client.put("ns/r0/a", [bytes(2 * PART_BYTES)])
    with pytest.raises(ChecksumMismatchError):
        read(client, "ns/r0/a", 4 * PART_BYTES)


def test_a_value_that_is_not_there_is_gone(client: ObjectStoreClient) -> None:
    with pytest.raises(ObjectGoneError):
        read(client, "ns/r0/none", 10)
    with pytest.raises(ObjectGoneError):
        read(client, "ns/r0/none", 4 * PART_BYTES)
    with pytest.raises(ObjectGoneError):
        client.get_start("ns/r0/none", 10)


def test_the_start_of_a_value_is_all_of_a_shorter_one(client: ObjectStoreClient) -> None:
    client.put("ns/r0/a", [b"0123456789"])
    client.put("ns/r0/empty", [])
    assert client.get_start("ns/r0/a", 4) == b"0123"
    assert client.get_start("ns/r0/a", 400) == b"0123456789"
    assert client.get_start("ns/r0/empty", 4) == b""


def test_the_starts_of_several_values_are_each_for_its_key(
    client: ObjectStoreClient, server: ObjectStoreServer
) -> None:
    """More than are asked for at once; None where there is nothing."""
    there = [f"ns/r0/{number}" for number in range(0, 150, 2)]
    put_all(server, there)
    server.raw_put(f"{PREFIX}/ns/r0/empty", b"")
    keys = [*(f"ns/r0/{number}" for number in range(150)), "ns/r0/empty"]
    whole = {key: client.get_start(key, 100) for key in there}
    found = client.get_starts(keys, 4)
    assert found[:-1] == [whole[key][:4] if key in whole else None for key in keys[:-1]]
    assert found[-1] == b""
    assert client.get_starts(there[:3], 1000) == [whole[key] for key in there[:3]]
    assert client.get_starts([], 4) == []


def test_values_are_removed_and_missing_ones_are_no_error(
    server: ObjectStoreServer, client: ObjectStoreClient
) -> None:
    client.put("ns/r0/a", [b"1"])
    client.put("ns/r0/b", [b"2"])
    client.remove(["ns/r0/a", "ns/r0/none", "ns/r0/a"])
    client.remove([])
    assert server.raw_list() == [f"{PREFIX}/ns/r0/b"]
    assert client.present(["ns/r0/a", "ns/r0/b"]) == [False, True]


def test_what_others_remove_or_write_is_seen_at_once(
    server: ObjectStoreServer, client: ObjectStoreClient
) -> None:
    client.put("ns/r0/a", [b"1"])
    assert client.present(["ns/r0/a"]) == [True]
    server.raw_delete(f"{PREFIX}/ns/r0/a")
    assert client.present(["ns/r0/a"]) == [False]
    server.raw_put(f"{PREFIX}/ns/r0/b", b"22")
    assert client.present(["ns/r0/a", "ns/r0/b"]) == [False, True]
    assert read(client, "ns/r0/b", 2) == [b"22"]


def test_more_values_than_one_page_are_listed_found_and_removed_by_their_prefix(
    server: ObjectStoreServer, client: ObjectStoreClient
) -> None:
    keys = [f"ns/r1/{number:04}" for number in range(1003)]
    put_all(server, keys)
    server.raw_put(f"{PREFIX}/ns/r10/other", b"1")
    server.raw_put(f"{PREFIX}/ns/r1-not", b"1")

    listed = [value for page in client.list_values("ns/r1/") for value in page]
    assert sorted(value.key for value in listed) == keys
    assert {value.size_bytes for value in listed} == {3}
    assert all(value.modified_seconds > 1e9 for value in listed)

    # All names are read for so many, and for fewer each value is asked for: the same answer.
    for count in (1003, 300, 300, 20):
        assert client.present(["ns/r1/none", *keys[:count]]) == [False] + [True] * count

    client.remove_under("ns/r1/")
    assert sorted(server.raw_list()) == [f"{PREFIX}/ns/r1-not", f"{PREFIX}/ns/r10/other"]


def put_all(server: ObjectStoreServer, keys: list[str]) -> None:
    server.raw_put_all({f"{PREFIX}/{key}": b"123" for key in keys})


def test_an_empty_prefix_of_the_bucket_has_no_values(client: ObjectStoreClient) -> None:
    assert [value for page in client.list_values("ns/r0/") for value in page] == []
    client.remove_under("ns/r0/")
    assert client.present([]) == []


def test_threads_use_one_client_at_once(client: ObjectStoreClient) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        value = random.Random(seed).randbytes((seed % 2) * 4 * PART_BYTES + 1000)
        key = f"ns/r0/{seed}"
        try:
            client.put(key, [value])
            assert read(client, key, len(value)) == [value]
            assert client.present([key, "ns/r0/none"]) == [True, False]
            client.remove([key])
            assert client.present([key]) == [False]
        except BaseException as fault:  # noqa: BLE001 - told by the test's own thread
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_the_url_alone_names_the_place(server: ObjectStoreServer) -> None:
    """A bucket without a prefix holds values at its top, and a slash at the end is none."""
    for url in (f"s3://{BUCKET}", f"s3://{BUCKET}/", f"s3://{BUCKET}/deep/er/"):
        client = make_client(server, url=url)
        key = f"ns/r0/{len(url)}"
        client.put(key, [b"1"])
        prefix = url.removeprefix(f"s3://{BUCKET}").strip("/")
        assert f"{prefix}/{key}".lstrip("/") in server.raw_list()
        assert [v.key for page in client.list_values("ns/r0/") for v in page].count(key) == 1
        client.close()
