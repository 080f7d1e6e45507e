"""The index: what it says after any history, and what damage to it costs."""

import os
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeClock, stamp
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.tiers import journal
from opal_connector.tiers.file_names import INDEX_NAME, object_key
from opal_connector.tiers.journal import IndexOwner, Journal, LoadedIndex, load_index
from opal_connector.transfers import ObjectName

OWNER = IndexOwner(sha256(b"namespace").digest(), 0, 4096)


def name(number: int) -> ObjectName:
    return ObjectName(0, stamp(1000), stamp(999) + stamp(number))


def key(number: int) -> bytes:
    return object_key(name(number))


def numbers(directory: Path) -> list[int]:
    """The numbers of the objects in the index, the least recently used first."""
    known = {key(number): number for number in range(2000)}
    loaded = load_index(str(directory), OWNER)
    assert all(loaded.names[one] == name(known[one]) for one in loaded.names)
    return [known[one] for one in loaded.names]


def resume(directory: Path, **kwargs: Any) -> Journal:
    made = Journal(str(directory), OWNER, **kwargs)
    made.resume(load_index(str(directory), OWNER), is_exact=True)
    return made


def test_history_is_remembered(tmp_path: Path) -> None:
    """Puts, touches and deletes give the objects in the order of their last use."""
    log = resume(tmp_path)
    for number in range(6):
        log.put(name(number))
    log.touch([key(1), key(0)])
    log.delete(key(3))
    log.put(name(2))
    log.touch([key(77)])  # nobody knows it
    log.close()

    assert numbers(tmp_path) == [4, 5, 1, 0, 2]


def test_history_goes_on_after_a_restart(tmp_path: Path) -> None:
    """A second process appends to what the first wrote."""
    first = resume(tmp_path)
    for number in range(4):
        first.put(name(number))
    first.close()
    second = resume(tmp_path)
    second.delete(key(0))
    second.touch([key(1)])
    second.close()

    assert numbers(tmp_path) == [2, 3, 1]


def test_nothing_waits_longer_than_a_second_of_activity(tmp_path: Path) -> None:
    """Entries are written in batches, at least once a second while there are any."""
    clock = FakeClock()
    log = resume(tmp_path, clock=clock)
    log.put(name(0))
    clock.now += 0.9
    log.put(name(1))
    assert numbers(tmp_path) == []

    clock.now += 0.1
    log.put(name(2))

    assert numbers(tmp_path) == [0, 1, 2]


def test_flush_writes_what_is_pending(tmp_path: Path) -> None:
    """At once, and without giving up the file."""
    log = resume(tmp_path, clock=FakeClock())
    log.put(name(0))
    log.flush()
    assert numbers(tmp_path) == [0]

    log.put(name(1))
    log.flush()

    assert numbers(tmp_path) == [0, 1]


@pytest.fixture(scope="module")
def whole_index(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An index with a snapshot and entries of every kind behind it."""
    directory = tmp_path_factory.mktemp("index")
    log = resume(directory)
    for number in range(20):
        log.put(name(number))
        log.flush()
    log.touch([key(3)])
    log.delete(key(4))
    log.close()
    return (directory / INDEX_NAME).read_bytes()


def test_torn_end_is_ignored(tmp_path: Path, whole_index: bytes) -> None:
    """Cut anywhere, it says what it said some entries earlier, and goes on from there."""
    touched = [*(number for number in range(20) if number != 3), 3]
    states = [list(range(count)) for count in range(21)] + [touched]
    for length in range(0, len(whole_index), 7):
        (tmp_path / INDEX_NAME).write_bytes(whole_index[:length])
        before = numbers(tmp_path)
        assert before in states

        log = resume(tmp_path)
        log.put(name(500))
        log.close()

        assert numbers(tmp_path) == [*before, 500]


@given(data=st.data())
def test_any_damage_gives_an_earlier_state(
    tmp_path_factory: pytest.TempPathFactory, whole_index: bytes, data: st.DataObject
) -> None:
    """Never an exception, and never an object that was not there."""
    directory = tmp_path_factory.mktemp("damaged")
    damaged = bytearray(whole_index)
    at = data.draw(st.integers(0, len(damaged) - 1))
    piece = data.draw(st.binary(min_size=1, max_size=40))
    damaged[at : at + len(piece)] = piece
    (directory / INDEX_NAME).write_bytes(damaged)

    found = numbers(directory)

    assert set(found) <= set(range(20))
    assert found[: min(len(found), 3)] == [0, 1, 2][: len(found)]


@given(noise=st.binary(max_size=500))
def test_noise_is_an_empty_index(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    """A file of somebody else's under this name is not believed."""
    directory = tmp_path_factory.mktemp("noise")
    (directory / INDEX_NAME).write_bytes(noise)

    assert numbers(directory) == []


@pytest.mark.parametrize(
    "other",
    [
        IndexOwner(sha256(b"other").digest(), 0, 4096),
        IndexOwner(OWNER.namespace, 1, 4096),
        IndexOwner(OWNER.namespace, 0, 8192),
        IndexOwner(OWNER.namespace, 0, 4096, version=99),
    ],
)
def test_index_of_another_owner_says_nothing(tmp_path: Path, other: IndexOwner) -> None:
    """Namespace, rank, row size and version are compared first."""
    log = Journal(str(tmp_path), other)
    log.resume(LoadedIndex(), is_exact=True)
    log.put(name(1))
    log.close()
    assert load_index(str(tmp_path), other).names

    assert load_index(str(tmp_path), OWNER) == LoadedIndex(
        size_bytes=(tmp_path / INDEX_NAME).stat().st_size
    )


def test_long_log_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million touches of ten objects do not fill the disk, and the order stays right."""
    monkeypatch.setattr(journal, "_SLACK_BYTES", 10_000)
    log = resume(tmp_path)
    order = list(range(10))
    for number in order:
        log.put(name(number))
    random_source = random.Random(1)
    longest = 0
    for _ in range(300):
        random_source.shuffle(order)
        log.touch([key(number) for number in order])
        log.flush()
        longest = max(longest, (tmp_path / INDEX_NAME).stat().st_size)

    log.close()
    assert longest < 25_000
    assert numbers(tmp_path) == order
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_snapshot_of_many_pages(tmp_path: Path) -> None:
    """A rewrite keeps all objects and their order, over the size of one frame."""
    log = resume(tmp_path)
    for number in range(1500):
        log.put(name(number))
    log.close()
    loaded = load_index(str(tmp_path), OWNER)
    del loaded.names[key(700)]

    again = Journal(str(tmp_path), OWNER)
    again.resume(loaded, is_exact=False)
    again.close()

    assert numbers(tmp_path) == [number for number in range(1500) if number != 700]


def test_full_disk_costs_entries_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a frame is written over: what comes when there is space again can be read."""
    log = resume(tmp_path)
    log.put(name(0))
    log.flush()
    real = os.pwritev

    def torn(file: int, buffers: list[memoryview], offset: int) -> int:
        real(file, [buffers[0][:5]], offset)
        raise OSError(28, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", torn)
        log.put(name(1))
        log.flush()
    log.put(name(2))
    log.close()

    assert numbers(tmp_path) == [0, 2]


def test_rewrite_that_fails_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no temporary file, and it is not tried again with every entry."""
    monkeypatch.setattr(journal, "_SLACK_BYTES", 1000)
    log = resume(tmp_path)
    log.put(name(0))
    log.flush()
    calls = 0

    def refuse(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        for _ in range(100):
            log.touch([key(0)] * 10)
            log.flush()

    log.close()
    assert 1 <= calls <= 4
    assert numbers(tmp_path) == [0]
    assert [path.name for path in tmp_path.iterdir()] == [INDEX_NAME]


def test_closed_journal_takes_entries_and_forgets_them(tmp_path: Path) -> None:
    """An I/O call that hung may end after the tier was closed."""
    log = resume(tmp_path)
    log.put(name(0))
    log.close()

    log.put(name(1))
    log.flush()
    log.close()

    assert numbers(tmp_path) == [0]
