"""Restarts, damaged and missing files, and disks that fail or hang."""

import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import (
    SIZE,
    Gate,
    Host,
    assert_told_exactly,
    buffer_of,
    hosted,
    key_of,
    loads_what_was_stored,
    store_some,
    tiers_of,
)
from medium import Medium


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    """Bytes, keys, sizes and tenants: nothing of them is in LMCache after a restart."""
    params = tiers_of(tmp_path, memory="1MiB")
    with hosted(params) as host:
        assert all(store_some(host, range(8), 3 * SIZE))
        assert all(store_some(host, range(8, 12), SIZE + 4, salt="tenant"))
        host.settle()
        before = host.adapter.list_l2_keys(page_size=100)
    with hosted(params) as host:
        assert host.look_up([key_of(n) for n in range(8)]) == [True] * 8
        assert host.adapter.list_l2_keys(page_size=100) == before
        assert host.adapter.get_usage().bytes_by_cache_salt["tenant"] == 4 * (SIZE + 4)
        assert all(loads_what_was_stored(host, n, 3 * SIZE) for n in range(8))
        assert all(loads_what_was_stored(host, n, SIZE + 4, salt="tenant") for n in range(8, 12))
        assert_told_exactly(host)


def test_the_index_is_not_needed_for_a_restart(tmp_path: Path) -> None:
    """A crash loses the end of the index; the files say the same."""
    params = tiers_of(tmp_path, memory=None)
    with hosted(params) as host:
        assert all(store_some(host, range(4)))
    [index] = tmp_path.rglob("index")
    index.unlink()
    with hosted(params) as host:
        assert host.look_up([key_of(n) for n in range(4)]) == [True] * 4


def test_objects_whose_context_is_lost_are_given_up(tmp_path: Path) -> None:
    """What nobody can name any more takes no room: it is deleted, and stored anew."""
    params = tiers_of(tmp_path, memory=None)
    with hosted(params) as host:
        assert all(store_some(host, range(4)))
    for context in tmp_path.rglob("contexts/*.json"):
        context.write_bytes(b"torn")
    with hosted(params) as host:
        assert host.look_up([key_of(n) for n in range(4)]) == [False] * 4
        host.settle()
        assert not list(tmp_path.rglob("*.opal"))
        assert all(store_some(host, range(4)))


def flip_a_byte(directory: Path, name_part: str = "") -> None:
    """Change one byte in the payload of every object's file."""
    for path in directory.rglob("*.opal"):
        with path.open("r+b") as file:
            file.seek(4096 + 100)
            byte = file.read(1)[0]
            file.seek(4096 + 100)
            file.write(bytes([byte ^ 1]))


def test_a_wrong_byte_is_a_miss_and_leaves_the_books(tmp_path: Path) -> None:
    """It is not delivered, LMCache is told that the key is gone, and the next store repairs it."""
    with hosted(tiers_of(tmp_path, memory=None)) as host:
        assert all(store_some(host, range(3)))
        flip_a_byte(tmp_path)

        assert host.look_up([key_of(1)]) == [True]
        target = buffer_of(SIZE)
        assert host.load([key_of(1)], [target]) == [False]
        assert not target.raw_data.any(), "a byte that did not verify was delivered"
        host.adapter.submit_unlock([key_of(1)])

        assert key_of(1) not in host.told.there
        assert host.look_up([key_of(1)]) == [False]
        assert all(store_some(host, range(1, 2)))
        assert loads_what_was_stored(host, 1, SIZE)
        assert_told_exactly(host)


def test_a_damaged_copy_is_replaced_by_another_tiers(tmp_path: Path) -> None:
    """One load finds the copy in memory damaged and takes the one on disk."""
    with hosted(tiers_of(tmp_path)) as host:
        assert all(store_some(host, range(1)))
        host.settle()
        rows = host.adapter._runtime.mover._tiers[0].rows
        rows[:1] ^= 1

        assert loads_what_was_stored(host, 0, SIZE)
        assert key_of(0) in host.told.there
        assert host.adapter.report_status()["failures"] == {"checksum": 1}


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    """A load of it is a 0 bit, not an error, and the key is gone."""
    with hosted(tiers_of(tmp_path, memory=None)) as host:
        assert all(store_some(host, range(2)))
        for path in tmp_path.rglob("*.opal"):
            path.unlink()

        assert not loads_what_was_stored(host, 0, SIZE)
        assert key_of(0) not in host.told.there


def test_a_failed_store_is_never_visible(tmp_path: Path) -> None:
    """The disk fails at the last moment: the task fails, no key is there, no file either."""
    medium = Medium(tmp_path)

    def failing(call: str, path: str) -> None:
        if call == "rename" and ".tmp-" in path and "contexts" not in path:
            raise OSError(5, "the disk has failed")

    with medium.installed(), hosted(tiers_of(tmp_path / "nvme", memory=None)) as host:
        host.look_up([key_of(0)])
        medium.rule = failing
        assert store_some(host, range(3)) == [False] * 3
        assert not host.told.there
        assert not list(tmp_path.rglob("*.opal"))
        assert host.look_up([key_of(n) for n in range(3)]) == [False] * 3


def lane_threads() -> list[threading.Thread]:
    """The threads that read and write files."""
    return [thread for thread in threading.enumerate() if "LocalNVMe" in thread.name]


def test_a_load_from_a_disk_that_hangs_ends_in_time(tmp_path: Path) -> None:
    """After the deadline it is a miss; the buffer is LMCache's again, and nothing writes to it."""
    medium, gate = Medium(tmp_path), Gate("preadv")
    settings = {"timeout_seconds": 0.3}
    params = tiers_of(tmp_path / "nvme", memory=None, LocalNVMe=settings)
    with medium.installed(), hosted(params) as host:
        assert all(store_some(host, range(2)))
        medium.rule = gate
        target = buffer_of(SIZE)
        try:
            assert host.load([key_of(0)], [target]) == [False]
        finally:
            gate.open.set()
        assert not target.raw_data.any()
        assert host.adapter._runtime.lent._lent == {}


def test_closing_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Work in flight ends as failed, its buffers are given back, and the call returns."""
    medium, gate = Medium(tmp_path), Gate("pwritev")
    with medium.installed():
        host = Host(tiers_of(tmp_path / "nvme", memory=None))
        host.look_up([key_of(0)])
        medium.rule = gate
        task = host.adapter.submit_store_task([key_of(0)], [buffer_of(SIZE, 1)])
        assert gate.reached.wait(30)
        lanes = lane_threads()
        began = time.monotonic()
        try:
            host.close()
            assert time.monotonic() - began < 20
        finally:
            gate.open.set()
        for thread in lanes:
            thread.join(30)

        assert not host.adapter.pop_completed_store_tasks()[task].is_successful()
        assert not list(tmp_path.rglob("*.opal"))
        host.adapter.submit_unlock([key_of(0)])


def test_a_load_that_comes_back_after_the_end_writes_nowhere(tmp_path: Path) -> None:
    """The buffer is LMCache's again when the adapter is closed, whatever a thread still does."""
    medium, gate = Medium(tmp_path), Gate("preadv")
    with medium.installed():
        host = Host(tiers_of(tmp_path / "nvme", memory=None))
        assert all(store_some(host, range(1)))
        target = buffer_of(SIZE)
        medium.rule = gate
        task = host.adapter.submit_load_task([key_of(0)], [target])
        assert gate.reached.wait(30)
        lanes = lane_threads()
        try:
            host.close()
            assert host.adapter.query_load_result(task).test(0) is False
        finally:
            gate.open.set()
        for thread in lanes:
            thread.join(30)
        assert not target.raw_data.any()
