"""What the next process finds after a crash, a reset or an opening that failed."""

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path

from medium import Hang, Medium, works
from soak.driver import (
    NEAR,
    begin_store,
    files,
    held,
    is_of_an_object,
    load,
    store,
)
from soak.host import Host

from opal_connector.transfers import TierHealth

MakeHost = Callable[..., Host]


# Processes that end.


def test_reset_holds_across_a_crash(make_host: MakeHost, medium: Medium) -> None:
    """A store that ends after a reset must not be found by the next process."""
    host = make_host(tiers=("CPUMemory", "LocalNVMe"), memory_blocks=1, timeout_seconds=5.0)
    medium.rule = hang = Hang(lambda call, path: call == "pwritev" and is_of_an_object(path))
    begin_store(host, [1, 2])
    hang.wait_until_stopped()
    host.manager.reset()
    host.hand_over(host.manager.plan_upkeep())
    done = threading.Event()
    medium.rule = works
    hang.let_go()
    deadline = time.monotonic() + 10
    while not done.is_set() and time.monotonic() < deadline:
        # The books are not told: the process dies before they could delete anything.
        if not any(mover.open_job_count for mover in host.movers):
            done.set()
        threading.Event().wait(0.005)

    assert files(host.root, "near") == []


def test_ht_54_killed_between_two_writes_of_a_name(make_host: MakeHost, tmp_path: Path) -> None:
    """An index older than the files: whatever it says, a read brings its own bytes or a miss."""
    first = make_host(tiers=("CPUMemory", "LocalNVMe"), near_bytes=6 * 8192)
    store(first, *([block] for block in range(4)))
    first.close()
    index = next((tmp_path / "near").rglob("index"))
    snapshot = index.read_bytes()
    second = make_host(tiers=("CPUMemory", "LocalNVMe"), near_bytes=6 * 8192)
    store(second, *([block] for block in range(10, 20)))
    second.close()
    index.write_bytes(snapshot)

    third = make_host(tiers=("CPUMemory", "LocalNVMe"), near_bytes=6 * 8192)

    for block in (*range(4), *range(10, 20)):
        if held(third, [block]):
            assert load(third, [block]) == set()
    assert third.wrong_bytes == 0
    assert len(third.manager.storage.tiers[NEAR]) == len(files(tmp_path, "near"))


def test_tier_that_could_not_be_opened_at_first_opens_where_it_was(
    make_host: MakeHost, medium: Medium, tmp_path: Path
) -> None:
    """A fault half-way through opening must not make the second try take another directory."""
    first = make_host(tiers=("CPUMemory", "LocalNVMe"))
    store(first, [1], [2], [3])
    first.close()
    faults = [errno.EIO]

    def once(call: str, path: str) -> None:
        if call in ("scandir", "listdir") and path.endswith("/r0") and faults:
            raise OSError(faults.pop(), "once", path)

    medium.rule = once

    second = make_host(tiers=("CPUMemory", "LocalNVMe"))

    second.run_until(lambda: second.health[0][NEAR] is TierHealth.OK)
    assert not faults
    assert len(second.manager.storage.tiers[NEAR]) == 3
    assert len(list((tmp_path / "near").glob("*/r0*"))) == 1
