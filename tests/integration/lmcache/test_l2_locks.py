"""Locks, deletions, and one key in several tasks."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

import torch
from l2_world import (
    SIZE,
    Gate,
    assert_told_exactly,
    buffer_of,
    hosted,
    key_of,
    loads_what_was_stored,
    store_some,
    tiers_of,
    until,
)
from medium import Medium


def test_what_is_locked_stays_until_the_last_unlock() -> None:
    """Neither an eviction nor a deletion takes it; every lookup's lock counts by itself."""
    with hosted(tiers_of(None, memory="1MiB")) as host:
        store_some(host, range(1))
        assert host.look_up([key_of(0)]) == host.look_up([key_of(0)]) == [True]
        host.adapter.submit_unlock([key_of(0)])

        host.adapter.delete([key_of(0)])
        assert all(store_some(host, range(1, 40)))
        assert loads_what_was_stored(host, 0, SIZE)

        host.adapter.submit_unlock([key_of(0)])
        host.adapter.delete([key_of(0)])
        assert not loads_what_was_stored(host, 0, SIZE)
        assert_told_exactly(host)


def test_unlocking_never_fails() -> None:
    """Once too often, never locked, never stored, deleted: LMCache does not ask twice."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(1))
        host.look_up([key_of(0)])
        for _ in range(3):
            host.adapter.submit_unlock([key_of(0), key_of(0), key_of(7)])
        host.adapter.delete([key_of(0)])
        host.adapter.submit_unlock([key_of(0)])
        assert len(host.books.locks) == 0


def test_a_store_waits_while_everything_is_locked() -> None:
    """Room that comes in time is used: the store is not dropped because it came too early."""
    with hosted(tiers_of(None, memory="1MiB")) as host:
        assert all(store_some(host, range(16)))
        locked = [key_of(n) for n in range(16)]
        assert all(host.look_up(locked))
        task = host.adapter.submit_store_task([key_of(99)], [buffer_of(SIZE, 100)])
        assert host.adapter.pop_completed_store_tasks() == {}

        host.adapter.submit_unlock(locked[:1])
        until(lambda: host.adapter.pop_completed_store_tasks().get(task, -1) >= 0, "the store ends")
        assert loads_what_was_stored(host, 99, SIZE)


def test_a_key_that_is_being_copied_can_be_deleted(tmp_path: Path) -> None:
    """The copy on its way to disk does not bring it back."""
    medium, gate = Medium(tmp_path), Gate("pwritev")
    with medium.installed(), hosted(tiers_of(tmp_path / "nvme")) as host:
        host.look_up([key_of(0)])
        medium.rule = gate
        assert all(store_some(host, range(1)))
        assert gate.reached.wait(30), "the copy has begun"
        host.adapter.delete([key_of(0)])
        assert host.look_up([key_of(0)]) == [False]
        gate.open.set()
        host.settle()

        assert host.look_up([key_of(0)]) == [False]
        assert not host.told.there
        assert not list(tmp_path.rglob("*.opal"))


def test_two_stores_of_one_key_at_once_both_succeed(tmp_path: Path) -> None:
    """The second waits for the first; there is one object, told once."""
    medium, gate = Medium(tmp_path), Gate("pwritev")
    with medium.installed(), hosted(tiers_of(tmp_path / "nvme", memory=None)) as host:
        host.look_up([key_of(0)])
        medium.rule = gate
        tasks = [
            host.adapter.submit_store_task([key_of(0)], [buffer_of(SIZE, 1)]) for _ in range(2)
        ]
        assert gate.reached.wait(30)
        assert host.adapter.pop_completed_store_tasks() == {}
        gate.open.set()
        results: dict[int, Any] = {}
        until(
            lambda: results.update(host.adapter.pop_completed_store_tasks()) or len(results) == 2,
            "both have ended",
        )
        assert [results[task].is_successful() for task in tasks] == [True, True]
        assert sorted(results.values()) == [0, SIZE]
        assert host.told.there == {key_of(0): SIZE}


def test_a_key_may_stand_twice_in_one_task() -> None:
    """One object, both buffers filled, two locks."""
    with hosted(tiers_of(None)) as host:
        keys = [key_of(0), key_of(0)]
        assert host.store(keys, [buffer_of(SIZE, 1), buffer_of(SIZE, 1)]).is_successful()
        assert host.look_up(keys) == [True, True]
        targets = [buffer_of(SIZE), buffer_of(SIZE)]
        assert host.load(keys, targets) == [True, True]
        assert torch.equal(targets[0].raw_data, targets[1].raw_data)
        host.adapter.submit_unlock(keys)
        assert len(host.books.locks) == 0
