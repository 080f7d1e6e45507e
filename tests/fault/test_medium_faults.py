"""Books, threads and files together while a medium hangs, fails, is slow, is full or is gone."""

import errno
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from medium import Hang, Medium, works
from soak.driver import (
    FAR,
    NEAR,
    TIMEOUT_SECONDS,
    begin_load,
    begin_store,
    evicted_to_disk,
    files,
    held,
    key,
    load,
    raising,
    store,
    temporaries,
)
from soak.host import REUSED, UNTOUCHED, Host

from opal_connector.transfers import FailureKind, TierHealth

STEP_SECONDS = 0.01  # HT-64: what a scheduler may lose to a medium that does not answer

MakeHost = Callable[..., Host]


# A medium that does not answer.


def test_ht_64_load_from_a_medium_that_hangs_ends_within_its_deadline(
    make_host: MakeHost, medium: Medium
) -> None:
    """It fails as TIMEOUT, no step waits for it, and bytes that come late reach nobody."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    prompt = evicted_to_disk(host)
    medium.rule = hang = Hang(lambda call, path: call == "preadv" and "/near/" in path)
    began = time.monotonic()
    begun = begin_load(host, prompt)
    hang.wait_until_stopped()
    steps: list[float] = []
    while begun.ranks_left:
        step_began = time.thread_time()
        host.step(0.0)
        steps.append(time.thread_time() - step_began)
        threading.Event().wait(0.002)
    took_seconds = time.monotonic() - began

    assert begun.failed == {0}
    assert host.failures == {"timeout": 1}
    assert took_seconds < TIMEOUT_SECONDS + 0.5
    assert max(steps) < STEP_SECONDS
    blocks = list(begun.job.objects[0].block_ids)
    host.give_back(blocks)
    hang.let_go()
    host.run_until(lambda: host.is_at_rest and host.health[0][NEAR] is TierHealth.OK)
    assert np.all(host.paged[0].blocks[blocks] == REUSED), "a late thread wrote to a block"
    assert load(host, prompt) == set()


def test_kept_rows_are_released_exactly_when_the_late_thread_returns(
    make_host: MakeHost, medium: Medium
) -> None:
    """Until then it may write there, so nobody else gets them."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    prompt = evicted_to_disk(host)
    medium.rule = hang = Hang(lambda call, path: call == "preadv" and "/near/" in path)
    begun = begin_load(host, prompt)
    rows = set(begun.job.objects[0].kept_rows)
    assert rows
    host.run_until(lambda: begun.ranks_left == 0)

    def owners() -> list[tuple[int, ...]]:
        return [
            record.rows
            for record in host.manager.storage.tiers[0].index.records.values()
            if rows & set(record.rows)
        ]

    for number in range(10, 14):
        begin_store(host, [number])
        host.step(0.0)
    assert owners() == [tuple(rows)]
    assert host.manager.open_job_count >= 1
    hang.let_go()
    host.run_until(lambda: host.is_at_rest)

    host.manager.check()
    assert host.manager.open_job_count == 0
    assert held(host, prompt) == 1


def test_store_that_hangs_while_it_is_published_is_answered(
    make_host: MakeHost, medium: Medium
) -> None:
    """A rename that does not return must not hold the blocks of a request for ever."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), writes=("off", "off"), memory_blocks=1)
    medium.rule = hang = Hang(lambda call, path: call == "rename" and "/near/" in path)
    begin_store(host, [1, 2])
    hang.wait_until_stopped()
    began = time.monotonic()
    host.run_until(lambda: not host.stores, timeout_seconds=10)

    assert time.monotonic() - began < 2 * TIMEOUT_SECONDS + 1.0
    assert host.failures == {"timeout": 1}
    hang.let_go()
    host.run_until(lambda: host.is_at_rest and host.health[0][NEAR] is TierHealth.OK)
    # The file that came late is no longer wanted, and is deleted before its bytes are free.
    assert host.manager.storage.tiers[NEAR].used_bytes == 0
    assert files(host.root, "near") == []


def test_late_deletion_does_not_take_the_new_file(make_host: MakeHost, medium: Medium) -> None:
    """A deletion that was given up and returns later must find its name still its own."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), writes=("through", "off"))
    store(host, [1], [2], [3], [4])
    hang = Hang(lambda call, path: call == "rename" and "/near/" in path)
    doomed = list(host.manager.storage.tiers[NEAR].index.readable_keys())
    medium.rule = hang
    for each in doomed:
        host.manager.storage.tiers[NEAR].remove(each)
    host.manager.report_health(0, host.health[0])
    host.step(0.0)
    hang.wait_until_stopped()
    deadline = time.monotonic() + 3 * TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        host.step(0.0)
        threading.Event().wait(0.01)
    # Everything but the one call that hangs works again.
    medium.rule = works
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.OK)
    for number in (1, 2, 3, 4):
        begin_store(host, [number])
        for _ in range(20):
            host.step(0.0)
            threading.Event().wait(0.005)
    hang.let_go()
    host.run_until(lambda: host.is_at_rest)

    there = host.manager.storage.tiers[NEAR].index.readable_keys()
    assert len(there) == len(files(host.root, "near"))
    host.manager.check()


@pytest.mark.parametrize("call", ["preadv", "pwritev", "rename", "open"])
def test_ht_64_close_returns_within_seconds_while_the_medium_hangs(
    make_host: MakeHost, medium: Medium, call: str
) -> None:
    """However a thread is stuck, the engine ends."""
    host = make_host(memory_blocks=1)
    store(host, [1], [2])
    medium.rule = hang = Hang(lambda name, path: name == call and path.endswith(".opal"))
    if call in ("rename", "pwritev"):
        medium.rule = hang = Hang(lambda name, path: name == call)
        begin_store(host, [5])
    else:
        begin_load(host, [1])
    host.run_until(lambda: hang.count > 0)

    took_seconds = host.close(timeout_seconds=0.5)

    assert took_seconds < 0.5 + 0.5 + 2.5  # for threads, closers, and who shares the directory
    hang.let_go()


# A medium that fails.


def test_ht_59_full_disk_sheds_stores_and_recovers(make_host: MakeHost, medium: Medium) -> None:
    """Loads go on, no temporary file is left, and stores work when there is space again."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    prompt = evicted_to_disk(host)
    medium.rule = raising(errno.ENOSPC, "pwritev", "pwrite")
    begin_store(host, [20])
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.NO_SPACE)
    host.run_until(lambda: not host.manager.open_job_count)
    assert load(host, prompt) == set()
    assert set(host.failures) == {"no_space"}
    assert temporaries(host.root) == []

    medium.rule = works
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.OK)
    store(host, [21], [22], [23])

    assert held(host, [21]) == 1
    assert host.manager.storage.tiers[NEAR].contains(key(host, [21]))


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EMFILE])
def test_ht_35_breaker_opens_by_error_and_closes_by_a_probe(
    make_host: MakeHost, medium: Medium, number: int
) -> None:
    """A tier that fails is left alone, and used again when it works; the engine never notices."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    medium.rule = raising(number, "open", "pwritev")
    blocks = iter(range(100))

    def is_suspended() -> bool:
        begin_store(host, [next(blocks)])
        return host.health[0][NEAR] is TierHealth.SUSPENDED

    host.run_until(is_suspended)
    assert host.failures["io"] >= 1

    medium.rule = works
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.OK)
    store(host, [300])

    assert host.manager.storage.tiers[NEAR].contains(key(host, [300]))


def test_ht_64_breaker_opens_by_latency(make_host: MakeHost, medium: Medium) -> None:
    """A medium that answers too slowly is as good as one that does not."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), timeout_seconds=0.2)

    def slow(call: str, path: str) -> None:
        if call == "pwritev" and "/near/" in path:
            time.sleep(0.12)

    medium.rule = slow
    for block in range(8):
        begin_store(host, [block])
        host.step(0.0)
        host.run_until(lambda: not host.stores)
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.SUSPENDED)
    assert FailureKind.TIMEOUT not in host.failures

    medium.rule = works
    host.run_until(lambda: host.health[0][NEAR] is TierHealth.OK)
    host.run_until(lambda: host.is_at_rest)


def test_source_that_cannot_be_read_does_not_suspend_the_target(
    make_host: MakeHost, medium: Medium
) -> None:
    """Whose fault it is decides who is left alone: the tier that was to be written is well."""
    host = make_host(
        memory_blocks=1, writes=("through", "demote"), near_bytes=60_000, far_bytes=10 << 20
    )
    medium.rule = raising(errno.EIO, "preadv", part="near")
    blocks = iter(range(2000))

    def is_blamed() -> bool:
        assert host.health[0][FAR] is TierHealth.OK
        begin_store(host, [next(blocks)])
        return host.failures.get("unreadable", 0) >= 6

    host.run_until(is_blamed)
    medium.rule = works
    host.run_until(lambda: host.is_at_rest)
    host.manager.check()


# Files that are gone.


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_emptying_that_fails_half_way_leaves_nothing_in_the_end(
    make_host: MakeHost, medium: Medium, number: int
) -> None:
    """What was taken out of sight and could not be deleted is deleted by the next try."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    store(host, [1], [2], [3])
    faults = [number]

    def once(call: str, path: str) -> None:
        if call in ("unlink", "rmdir", "scandir", "open") and ".tmp-" in path and faults:
            raise OSError(faults.pop(), "once", path)

    medium.rule = once
    host.manager.reset()
    host.run_until(lambda: host.is_at_rest)

    assert not faults
    assert files(host.root, "near") == []
    assert temporaries(host.root) == []


@pytest.mark.parametrize("depth", ["slot", "root"])
def test_ht_55_directory_that_is_removed_under_load_is_a_miss(
    make_host: MakeHost, tmp_path: Path, depth: str
) -> None:
    """`rm -rf` while stores and loads run: nothing is raised, and the tier fills up again."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), near_bytes=20 * 8192)
    for block in range(40):
        begin_store(host, [block])
        host.step(0.0)
        if block == 20:
            target = tmp_path / "near"
            shutil.rmtree(target if depth == "root" else next(target.iterdir()), ignore_errors=True)
        if block % 3 == 0 and held(host, [block // 2]):
            begin_load(host, [block // 2])
    (tmp_path / "near").mkdir(exist_ok=True)  # whoever mounted it mounts it again
    host.run_until(lambda: host.is_at_rest and host.health[0][NEAR] is TierHealth.OK)
    store(host, *([block] for block in range(50, 90)))

    tier = host.manager.storage.tiers[NEAR]
    assert host.wrong_bytes == 0
    assert files(tmp_path, "near"), "nothing is written any more"
    for block in range(40):
        if held(host, [block]):
            load(host, [block])  # a miss tells the books
    host.run_until(lambda: host.is_at_rest)
    on_disk = sum(path.stat().st_size for path in files(tmp_path, "near"))
    assert on_disk == sum(record.size_bytes for record in tier.index.records.values())
    assert on_disk == tier.used_bytes


def test_ht_55_object_evicted_while_its_read_is_blocked(
    make_host: MakeHost, medium: Medium
) -> None:
    """The file stays until the read has ended; what is published meanwhile is not touched."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), timeout_seconds=5.0)
    prompt = evicted_to_disk(host)
    tier = host.manager.storage.tiers[NEAR]
    medium.rule = hang = Hang(lambda call, path: call == "preadv" and "/near/" in path)
    begun = begin_load(host, prompt)
    hang.wait_until_stopped()
    before = len(files(host.root, "near"))
    tier.remove(key(host, prompt))
    host.manager.report_health(0, host.health[0])
    for _ in range(10):
        host.step(0.0)
        threading.Event().wait(0.002)
    assert len(files(host.root, "near")) == before
    hang.let_go()
    host.run_until(lambda: begun.ranks_left == 0)
    host.run_until(lambda: host.is_at_rest)

    assert begun.failed == set()
    assert host.wrong_bytes == 0
    assert len(files(host.root, "near")) == before - 1
    assert len(files(host.root, "near")) == len(tier.index.readable_keys())


def test_ht_55_file_removed_by_others_while_it_is_promised(make_host: MakeHost) -> None:
    """Between lookup and load the file goes: a miss, a DELETE, and the next store writes it."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"))
    prompt = evicted_to_disk(host)
    for path in files(host.root, "near"):
        path.unlink()

    begun = begin_load(host, prompt)
    host.run_until(lambda: begun.ranks_left == 0)

    assert begun.failed == {0}
    blocks = list(begun.job.objects[0].block_ids)
    assert np.all(host.paged[0].blocks[blocks] == UNTOUCHED)
    host.run_until(lambda: host.is_at_rest)
    assert held(host, prompt) == 0
    store(host, prompt)
    assert len(files(host.root, "near")) == 1
