"""The ledger of a shared directory: one limit for all, whoever lives or dies."""

import multiprocessing
import os
from pathlib import Path

import pytest

from opal_connector.tiers.file_names import host_digits, own_process
from opal_connector.tiers.file_sizes import filesystem_now
from opal_connector.tiers.shared_ledger import LEDGER_NAME, Share, locked_ledger


def share(unused_bytes: int, *, host: str | None = None, pid: int | None = None) -> Share:
    """A share of this process, unless told otherwise."""
    own_pid, start_time = own_process()
    return Share(host or host_digits(), pid or own_pid, start_time, unused_bytes)


def test_changes_are_kept(tmp_path: Path) -> None:
    """What one process writes the next one reads."""
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.scanned_bytes == -1, "nobody has looked yet"
        ledger.scanned_bytes = 7
        ledger.shares["a"] = share(5)
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert (ledger.scanned_bytes, ledger.promised_bytes, ledger.total_bytes) == (7, 5, 12)


def test_failure_changes_nothing(tmp_path: Path) -> None:
    """An error between reading and writing leaves the ledger as it was, and the lock free."""
    context = locked_ledger(tmp_path, timeout_seconds=1)
    context.__enter__().scanned_bytes = 7
    with pytest.raises(RuntimeError):
        context.gen.throw(RuntimeError)  # type: ignore[attr-defined]
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.scanned_bytes == -1


def test_lock_excludes_others_within_its_time(tmp_path: Path) -> None:
    """Two at once would both grant the same bytes."""
    with (
        locked_ledger(tmp_path, timeout_seconds=1),
        pytest.raises(TimeoutError),
        locked_ledger(tmp_path, timeout_seconds=0.05),
    ):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b'{"scanned_bytes": "many"}', b"\xff\x00"])
def test_unreadable_ledger_counts_as_none(tmp_path: Path, content: bytes) -> None:
    """A torn file costs a scan, nothing else."""
    (tmp_path / LEDGER_NAME).write_bytes(content)
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.scanned_bytes == -1
        assert ledger.shares == {}


def _child(pipe: "multiprocessing.connection.Connection") -> None:
    pipe.send(own_process())
    pipe.recv()


def test_share_of_a_dead_process_counts_as_spent(tmp_path: Path) -> None:
    """It may have written all that it was granted; a living one's share stays its own."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(theirs,))
    process.start()
    pid, start_time = ours.recv()
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        ledger.scanned_bytes = 0
        ledger.shares["other"] = Share(host_digits(), pid, start_time, 5)
        ledger.shares["own"] = share(3)
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.shares.keys() == {"other", "own"}
    os.kill(pid, 9)
    process.join()

    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.shares.keys() == {"own"}
        assert (ledger.spent_bytes, ledger.promised_bytes) == (5, 3)


def test_silent_instance_of_another_host_is_dead_after_a_while(tmp_path: Path) -> None:
    """By the clock of the filesystem, so that a host with another time is not declared dead."""
    now = filesystem_now(str(tmp_path))
    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        ledger.scanned_bytes = 0
        ledger.shares["fresh"] = share(1, host="elsewhere")
        ledger.shares["fresh"].beat = now - 60
        ledger.shares["silent"] = share(2, host="elsewhere")
        ledger.shares["silent"].beat = now - 200

    with locked_ledger(tmp_path, timeout_seconds=1) as ledger:
        assert ledger.shares.keys() == {"fresh"}
        assert ledger.spent_bytes == 2
