"""The client for Mooncake Store against a real one: every promise of `EngineClient`."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from integration.engines.mooncake_server import (
    LEASE_SECONDS,
    MooncakeServer,
    helper_of,
    make_client,
    mooncake_server,
    until,
)

from opal_connector.tiers import ChecksumMismatchError, allocate_host_rows
from opal_connector.tiers.base import Rows
from opal_connector.tiers.engines.client import Span
from opal_connector.tiers.engines.mooncake import MooncakeClient
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError

MIB = 1 << 20
LEASED = -706
HEADER = bytes(range(256)) * 16


@pytest.fixture(scope="module")
def client(mooncake: MooncakeServer) -> Iterator[MooncakeClient]:
    client = make_client(mooncake)
    yield client
    client.close()


@pytest.fixture(autouse=True)
def empty(client: MooncakeClient) -> None:
    client.remove_under("t/")


def some_rows(count: int, row_bytes: int = MIB, seed: int = 1) -> Rows:
    rows = allocate_host_rows(row_count=count, row_bytes=row_bytes)
    rows[...] = np.random.default_rng(seed).integers(0, 256, rows.shape, np.uint8)
    return rows


def whole(client: MooncakeClient, key: str, size_bytes: int) -> bytes:
    into = bytearray(size_bytes)
    client.get(key, size_bytes, [Span(0, [memoryview(into)])])
    return bytes(into)


# What is stored comes back.


@pytest.mark.parametrize("is_prepared", [True, False])
def test_value_of_many_parts_comes_back(client: MooncakeClient, is_prepared: bool) -> None:
    """A header and rows in any order, from and into memory that is registered, or any other."""
    rows, into = some_rows(4), some_rows(4, seed=2)
    if is_prepared:
        client.prepare(rows)
        client.prepare(into)
        client.prepare(into)
    untouched = into[3].copy()
    client.put("t/1", [HEADER, rows[2].data, rows[0].data, b"", rows[1].data])
    header = bytearray(len(HEADER))
    size_bytes = len(HEADER) + 3 * MIB
    buffers = [memoryview(header), into[0].data, into[1].data, into[2].data]
    client.get("t/1", size_bytes, [Span(0, buffers)])
    assert header == HEADER
    assert np.array_equal(into[:3], rows[[2, 0, 1]])
    assert np.array_equal(into[3], untouched)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_parts_of_a_value(client: MooncakeClient, is_prepared: bool) -> None:
    """Only what is asked for arrives, each part where it belongs."""
    rows, into = some_rows(4, 70_000), some_rows(4, 70_000, seed=2)
    if is_prepared:
        client.prepare(rows)
        client.prepare(into)
    untouched = into[[0, 3]].copy()
    client.put("t/1", [HEADER, rows.data])
    header = bytearray(100)
    spans = [
        Span(3, [memoryview(header)]),
        Span(len(HEADER) + 70_000, [into[2].data]),
        Span(len(HEADER) + 3 * 70_000, [into[1].data]),
    ]
    client.get("t/1", len(HEADER) + 4 * 70_000, spans)
    assert header == HEADER[3:103]
    assert np.array_equal(into[2], rows[1])
    assert np.array_equal(into[1], rows[3])
    assert np.array_equal(into[[0, 3]], untouched)


@pytest.mark.parametrize("size_bytes", [1, 10, len(HEADER), 100_000])
def test_start_of_a_value(client: MooncakeClient, size_bytes: int) -> None:
    """As many bytes as are asked for, or all that there are."""
    client.put("t/1", [HEADER])
    assert client.get_start("t/1", size_bytes) == HEADER[:size_bytes]


def test_put_replaces(client: MooncakeClient) -> None:
    """Other bytes, fewer, more; also while the old ones are leased by a reader."""
    for value in (b"a" * 5000, b"b" * 5000, b"c" * 10, b"d" * 70_000):
        client.put("t/1", [value])
        assert whole(client, "t/1", len(value)) == value


def test_put_of_what_is_there_leaves_it(client: MooncakeClient, mooncake: MooncakeServer) -> None:
    """Instances that compute the same store it once, and no reader loses it meanwhile.

    The lease tells: it comes from looking at what is there, a new value has none.
    """
    rows = some_rows(2)
    client.put("t/1", [HEADER, rows.data])
    client.put("t/1", [HEADER, rows.data])
    assert mooncake.raw_remove_unforced("opal/t/1") == LEASED
    client.put("t/1", [HEADER, rows[1].data])
    assert mooncake.raw_remove_unforced("opal/t/1") == 0


def test_prefixes_are_apart(client: MooncakeClient, mooncake: MooncakeServer) -> None:
    """What stands before all keys keeps users of one store apart."""
    other = make_client(mooncake, prefix="other")
    client.put("t/1", [b"ours"])
    assert other.present(["t/1"]) == [False]
    other.put("t/1", [b"theirs"])
    other.remove_under("t/")
    assert whole(client, "t/1", 4) == b"ours"
    other.close()


def test_threads_side_by_side(client: MooncakeClient) -> None:
    """Each finds its own bytes, and those of a key that all of them write."""
    failures: list[BaseException] = []
    common = some_rows(1, seed=99)

    def work(seed: int) -> None:
        try:
            rows, into = some_rows(2, seed=seed), some_rows(2, seed=0)
            client.prepare(rows)
            client.prepare(into)
            for number in range(10):
                client.put(f"t/{seed}-{number}", [HEADER, rows.data])
                client.put("t/common", [common.data])
                header = bytearray(len(HEADER))
                spans = [Span(0, [memoryview(header), into.data.cast("B")])]
                client.get(f"t/{seed}-{number}", len(HEADER) + 2 * MIB, spans)
                assert np.array_equal(rows, into)
                assert whole(client, "t/common", MIB) == common.tobytes()
        except BaseException as error:  # noqa: BLE001 - the test's thread must hear of it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_waiting_gives_way_to_moving(client: MooncakeClient) -> None:
    """The threads that wait for transfers, which they do without a pause, run after all others."""
    client.put("t/1", [b"value"])
    pid = helper_of(client)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    nicer = [os.getpriority(os.PRIO_PROCESS, thread) > own for thread in threads]
    assert 0 < sum(nicer) < len(nicer) / 2


# What is not there.


def test_missing_value_is_gone(client: MooncakeClient) -> None:
    """Whole, in parts, or its start; to remove it is no error."""
    client.put("t/other", [b"x"])
    into = memoryview(bytearray(10))
    for call in (
        lambda: client.get("t/1", 10, [Span(0, [into])]),
        lambda: client.get("t/1", 100, [Span(5, [into])]),
        lambda: client.get_start("t/1", 10),
    ):
        with pytest.raises(ObjectGoneError):
            call()
    client.remove(["t/1"])
    client.remove([])
    assert client.present(["t/1", "t/other"]) == [False, True]
    assert client.present([]) == []


@pytest.mark.parametrize("expected_bytes", [4999, 5001, 100, 9000])
def test_value_of_another_size(client: MooncakeClient, expected_bytes: int) -> None:
    """Is told from one that is damaged nowhere, whole and in parts."""
    client.put("t/1", [b"a" * 5000])
    for spans in (
        [Span(0, [memoryview(bytearray(expected_bytes))])],
        [Span(50, [memoryview(bytearray(20))])],
    ):
        with pytest.raises(ChecksumMismatchError):
            client.get("t/1", expected_bytes, spans)


def test_removed_although_leased(client: MooncakeClient) -> None:
    """A reader a moment ago does not keep a value alive: what is damaged must go."""
    client.put("t/1", [b"a"])
    whole(client, "t/1", 1)
    client.remove(["t/1", "t/2"])
    assert client.present(["t/1"]) == [False]


def test_remove_under_takes_only_what_is_under(client: MooncakeClient) -> None:
    """Letters that mean something in a pattern mean themselves."""
    keys = ["t/a.b/1", "t/a.b/2", "t/axb/1", "t/a.b-", "t/t/a.b/1"]
    for key in keys:
        client.put(key, [b"v"])
    client.remove_under("t/a.b/")
    assert client.present(keys) == [False, False, True, True, True]
    client.remove_under("t/nothing/")


def test_value_that_is_being_written(client: MooncakeClient, mooncake: MooncakeServer) -> None:
    """Is not there yet for anybody. A writer who died blocks its key until the master knows."""
    assert mooncake.raw_start_put("opal/t/1", 10) == 0
    assert client.present(["t/1"]) == [False]
    with pytest.raises(ObjectGoneError):
        whole(client, "t/1", 10)
    client.remove(["t/1"])
    began = time.monotonic()
    with pytest.raises(OSError, match="else is writing"):
        client.put("t/1", [b"0123456789"])
    assert time.monotonic() - began < 5
    until(lambda: can_put(client, "t/1"))
    assert whole(client, "t/1", 10) == b"0123456789"


@pytest.mark.parametrize("how", ["get", "present", "touch"])
def test_use_leases(client: MooncakeClient, mooncake: MooncakeServer, how: str) -> None:
    """What was used or asked for is not evicted for a while; afterwards it can be."""
    client.put("t/1", [b"v"])
    if how == "get":
        whole(client, "t/1", 1)
    else:
        getattr(client, how)(["t/1"])
    assert mooncake.raw_remove_unforced("opal/t/1") == LEASED
    began = time.monotonic()
    until(lambda: mooncake.raw_remove_unforced("opal/t/1") == 0)
    assert time.monotonic() - began < 3 * LEASE_SECONDS
    assert client.present(["t/1"]) == [False]


def test_full_store(tmp_path: Path) -> None:
    """Says so while nothing may be evicted; what is stored stays readable. Then it evicts."""
    rows = some_rows(4)
    with mooncake_server(tmp_path, memory_mib=64, lease_seconds=5) as small:
        client = make_client(small)
        client.prepare(rows)
        stored: list[str] = []
        with pytest.raises(NoSpaceError):
            fill(client, rows, stored)
        # Above its mark the store evicts at once what is new and was not used yet.
        held = client.present(stored)
        stored = [key for key, is_held in zip(stored, held, strict=True) if is_held]
        assert len(stored) >= 8
        for key in stored:
            assert whole(client, key, rows.nbytes) == rows.tobytes()
        until(lambda: can_put(client, "t/new", rows))
        for number in range(10):  # the least lately used go
            until(lambda number=number: can_put(client, f"t/more{number}", rows))
        left = client.present(stored)
        assert not all(left)
        with pytest.raises(ObjectGoneError):
            whole(client, stored[left.index(False)], rows.nbytes)
        client.close()


def fill(client: MooncakeClient, rows: Rows, stored: list[str]) -> None:
    """Store more than there is room for, and use all of it again and again."""
    for number in range(40):
        client.put(f"t/{number}", [rows.data])
        stored.append(f"t/{number}")
        client.touch(stored)


def can_put(client: MooncakeClient, key: str, rows: Rows | None = None) -> bool:
    try:
        client.put(key, [b"0123456789" if rows is None else rows.data])
    except OSError:
        return False
    return True
