"""What `ValkeyClient` promises as an `EngineClient`, against a real server."""

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkey_server import ValkeyServer, valkey_server

from opal_connector.config import ConfigError
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.valkey import ValkeyClient
from opal_connector.tiers.file_errors import ObjectGoneError

MEBIBYTE = 1 << 20
VALUE = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> ValkeyServer:
    shared_server.command("FLUSHALL")
    return shared_server


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[ValkeyClient]:
    made = ValkeyClient(server.url, timeout_seconds=20.0)
    yield made
    made.close()


def whole(client: ValkeyClient, key: str, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    client.get(key, size_bytes, [Span(0, [memoryview(data)])])
    return bytes(data)


def test_a_value_is_its_parts_one_after_the_other_under_the_prefix(
    server: ValkeyServer, client: ValkeyClient
) -> None:
    """What is put is one string that other clients can read."""
    client.put("a/r0/x-g0", [VALUE[:10], b"", memoryview(VALUE)[10:100], bytearray(VALUE[100:])])
    assert server.value("opal:a/r0/x-g0") == VALUE
    assert whole(client, "a/r0/x-g0", len(VALUE)) == VALUE


def test_more_parts_and_buffers_than_one_call_to_the_kernel_takes(client: ValkeyClient) -> None:
    """Thousands of parts go out and come in, in order."""
    pieces = [VALUE[i % 200 : i % 200 + 7] for i in range(3000)]
    expected = b"".join(pieces)
    client.put("many", pieces)
    data = bytearray(len(expected))
    view = memoryview(data)
    client.get("many", len(data), [Span(0, [view[i : i + 5] for i in range(0, len(data), 5)])])
    assert data == expected


@pytest.mark.parametrize("size", [0, 1, 5999, 6001, 65_536, 16 * MEBIBYTE])
def test_values_of_every_size_come_back_as_they_were(client: ValkeyClient, size: int) -> None:
    """The smallest and the largest, byte for byte."""
    data = random.Random(7).randbytes(size)
    client.put("sized", [data])
    assert whole(client, "sized", size) == data


def test_a_large_value_by_a_socket_in_the_filesystem(server: ValkeyServer) -> None:
    """`unix://` works as TCP does."""
    client = ValkeyClient(f"unix://{server.socket_path}?db=0", timeout_seconds=20.0)
    data = random.Random(8).randbytes(4 * MEBIBYTE)
    client.put("local", [data])
    assert whole(client, "local", len(data)) == data
    client.close()


def test_parts_of_a_value_fill_their_buffers_and_nothing_else(client: ValkeyClient) -> None:
    """Ranges, some split over buffers, some empty, come in one call."""
    client.put("parts", [VALUE])
    data = bytearray(b"." * 40)
    view = memoryview(data)
    spans = [Span(5, [view[0:3], view[10:14]]), Span(50, [view[20:20]]), Span(9000, [view[30:39]])]
    client.get("parts", len(VALUE), spans)
    assert data[0:3] + data[10:14] == VALUE[5:12]
    assert data[30:39] == VALUE[9000:9009]
    assert data[3:10] + data[14:30] + data[39:] == b"." * 24


@pytest.mark.parametrize("offset", [None, 0, 3])
def test_a_value_that_is_not_there_is_gone(client: ValkeyClient, offset: int | None) -> None:
    """Asked for in whole or in part; the connection is good afterwards."""
    data = bytearray(len(VALUE) if offset is None else 5)
    with pytest.raises(ObjectGoneError):
        client.get("none", len(VALUE), [Span(offset or 0, [memoryview(data)])])
    client.put("none", [VALUE])
    assert whole(client, "none", len(VALUE)) == VALUE


@pytest.mark.parametrize("size", [0, 5, len(VALUE) - 1, len(VALUE) + 1, MEBIBYTE])
def test_a_value_of_another_size_is_refused(client: ValkeyClient, size: int) -> None:
    """Longer, shorter or empty: never bytes of something else; the next call is right again."""
    client.put("other", [bytes(size)])
    data = bytearray(len(VALUE))
    with pytest.raises(ChecksumMismatchError):
        client.get("other", len(VALUE), [Span(0, [memoryview(data)])])
    with pytest.raises(ChecksumMismatchError):
        client.get("other", len(VALUE), [Span(3, [memoryview(data)[:1]])])
    assert whole(client, "other", size) == bytes(size)


def test_the_start_of_a_value(client: ValkeyClient) -> None:
    """As much as there is, and none of a value that is not there."""
    client.put("start", [VALUE])
    assert client.get_start("start", 4096) == VALUE[:4096]
    assert client.get_start("start", 1 << 20) == VALUE
    assert client.get_start("start", 0) == b""
    with pytest.raises(ObjectGoneError):
        client.get_start("none", 4096)


def test_readers_see_a_whole_value_while_it_is_replaced(
    server: ValkeyServer, client: ValkeyClient
) -> None:
    """Never a mixture of the old and the new one."""
    values = [bytes([letter]) * MEBIBYTE for letter in b"ab"]
    client.put("turns", [values[0]])
    is_done = threading.Event()

    def write() -> None:
        for value in itertools.islice(itertools.cycle(values), 60):
            client.put("turns", [value[: MEBIBYTE // 2], value[MEBIBYTE // 2 :]])
        is_done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not is_done.is_set():
        value = whole(client, "turns", MEBIBYTE)
        assert value in values
        seen.add(value[0])
    writer.join()
    assert seen


def test_many_keys_are_asked_for_in_one_round_trip(
    server: ValkeyServer, client: ValkeyClient
) -> None:
    """A thousand answers, each for its key, and no thousand requests."""
    server.fill({f"opal:k{number}": "x" for number in range(0, 1000, 7)})
    client.present(["k0"])
    before = server.command("INFO", "stats")["total_reads_processed"]
    found = client.present([f"k{number}" for number in range(1000)])
    after = server.command("INFO", "stats")["total_reads_processed"]
    assert found == [number % 7 == 0 for number in range(1000)]
    assert after - before < 20
    assert client.present([]) == []


def test_removing_takes_what_is_named_and_nothing_else(
    server: ValkeyServer, client: ValkeyClient
) -> None:
    """More keys than one command takes; what is not there is no error."""
    server.fill({f"opal:k{number}": "x" for number in range(1500)})
    client.remove([f"k{number}" for number in range(1, 3000)])
    assert server.command("KEYS", "*") == [b"opal:k0"]
    client.remove([])


def test_removing_and_listing_a_prefix_leave_others_alone(server: ValkeyServer) -> None:
    """A prefix with the letters of patterns stands for itself alone."""
    client = ValkeyClient(server.url, prefix="o*[a]?", timeout_seconds=20.0)
    server.fill({f"o*[a]?:n/r0/{number}": "x" * (number % 9) for number in range(5000)})
    foreign = ["o*[a]?:n/r1/0", "o*[a]?:n/r", "ooa1:n/r0/1", "opal:n/r0/1"]
    server.fill(dict.fromkeys(foreign, "x"))
    server.command("RPUSH", "o*[a]?:n/r0/list", "not a string")
    listed = {value.key: value.size_bytes for page in client.list_values("n/r0/") for value in page}
    assert listed == {f"n/r0/{number}": number % 9 for number in range(5000)}
    client.remove_under("n/r0/")
    assert sorted(server.command("KEYS", "*")) == sorted(name.encode() for name in foreign)
    assert list(client.list_values("n/r0/")) == []
    client.close()


def test_values_end_by_themselves_unless_they_are_used(server: ValkeyServer) -> None:
    """With `ttl_seconds`, and `touch` begins anew; without it they stay."""
    client = ValkeyClient(server.url, ttl_seconds=100.0, timeout_seconds=20.0)
    client.put("ends", [VALUE])
    assert 90_000 < server.command("PTTL", "opal:ends") <= 100_000
    server.command("PEXPIRE", "opal:ends", 5000)
    client.touch(["ends", "none"])
    assert 90_000 < server.command("PTTL", "opal:ends") <= 100_000
    client.close()
    lasting = ValkeyClient(server.url, timeout_seconds=20.0)
    lasting.put("ends", [VALUE])
    lasting.touch(["ends"])
    assert server.command("PTTL", "opal:ends") == -1
    lasting.close()


def test_threads_share_a_few_connections_and_never_each_others_answers(
    server: ValkeyServer,
) -> None:
    """Twelve threads over three connections, each with values of its own."""
    client = ValkeyClient(server.url, timeout_seconds=60.0, connections=3)
    before = server.command("INFO", "clients")["connected_clients"]
    wrong: list[str] = []
    most: list[int] = []

    def work(number: int) -> None:
        choose = random.Random(number)
        for turn in range(40):
            data = choose.randbytes(choose.choice((10, 5000, 200_000)))
            key = f"t{number}"
            client.put(key, [data[:5], data[5:]])
            if whole(client, key, len(data)) != data or client.present([key, "no"]) != [
                True,
                False,
            ]:
                wrong.append(f"{key} in turn {turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    most.append(server.command("INFO", "clients")["connected_clients"])
    for thread in threads:
        thread.join()
    most.append(server.command("INFO", "clients")["connected_clients"])
    assert not wrong
    assert max(most) - before <= 3
    client.close()


def test_closing_gives_up_the_connections(server: ValkeyServer) -> None:
    """Nothing of a closed client is left in the server."""
    client = ValkeyClient(server.url, prefix="", timeout_seconds=20.0)
    client.put("bare", [b"x"])
    assert server.value("bare") == b"x"
    name = "cmd=set"
    assert name in str(server.command("CLIENT", "LIST"))
    client.close()
    for _ in range(1000):
        if name not in str(server.command("CLIENT", "LIST")):
            return
    pytest.fail("the connection is still there")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:geheim@host", "scheme"),
        ("redis://user:geheim/word@host:6379", "cannot be read"),
        ("redis://:geheim@host/0?no_such_option=1", "option"),
        ("redis://:geheim@host/0?socket_timeout=5", "socket_timeout"),
    ],
)
def test_a_wrong_address_is_one_sentence_without_the_password(url: str, words: str) -> None:
    """It names the field and what is allowed."""
    with pytest.raises(ConfigError) as caught:
        ValkeyClient(url, timeout_seconds=1.0)
    text = str(caught.value)
    assert text.startswith("Valkey.url: found ")
    assert words in text
    assert "allowed: " in text
    assert "geheim" not in text


def test_a_time_to_live_of_nothing_is_refused() -> None:
    """The server would drop what it has just got."""
    with pytest.raises(ConfigError, match=r"Valkey\.ttl_seconds: found 0, allowed"):
        ValkeyClient("redis://host", ttl_seconds=0, timeout_seconds=1.0)


@pytest.mark.parametrize("package", ["redis", "hiredis"])
def test_without_the_library_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The extra has both packages."""
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'opal-connector\[valkey\]'"):
        ValkeyClient("redis://host", timeout_seconds=1.0)


def test_making_a_client_connects_to_nothing(tmp_path: Path) -> None:
    """Only its first call does, and then it is an error of the system."""
    client = ValkeyClient(f"unix://{tmp_path}/nobody", timeout_seconds=5.0)
    with pytest.raises(ConnectionError):
        client.present(["x"])
    client.close()
