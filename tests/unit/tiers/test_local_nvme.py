"""What only `LocalNVMe` does: slots for processes, an index, leftovers of dead processes."""

import fcntl
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from fakes import stamp

from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers import allocate_host_rows, file_bytes
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_names import new_temporary_name, object_key, object_path, slot_name
from opal_connector.tiers.local_nvme import LocalNVMe
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
ROW_BYTES = 4096
ROWS = allocate_host_rows(row_count=1, row_bytes=ROW_BYTES)


def name(number: int) -> ObjectName:
    return ObjectName(0, stamp(999), stamp(number))


def opened(root: Path, row_bytes: int = ROW_BYTES) -> tuple[LocalNVMe, list[ObjectName]]:
    tier = LocalNVMe(root, row_bytes=row_bytes, rank=0)
    return tier, [name for page in tier.open(NAMESPACE) for name in page]


def write(tier: LocalNVMe, number: int) -> Path:
    tier.write_object(name(number), ROWS, [0], [row_check(ROWS[0], name(number).run, 0)])
    return Path(object_path(str(tier.directory), object_key(name(number))))


def test_second_process_takes_the_next_slot(tmp_path: Path) -> None:
    """The first one's objects are not its own; a restart finds the first free slot again."""
    first, _ = opened(tmp_path)
    write(first, 1)
    second, names = opened(tmp_path)
    third, _ = opened(tmp_path)
    assert names == []
    assert [tier.directory.name for tier in (first, second, third)] == ["r0", "r0-1", "r0-2"]
    write(second, 2)

    second.close()
    again, names = opened(tmp_path)
    assert again.directory.name == "r0-1"
    assert names == [name(2)]

    first.close()
    again.close()
    third.close()
    again, names = opened(tmp_path)
    assert again.directory.name == "r0"
    assert names == [name(1)]
    again.close()


def test_killed_process_gives_its_slot_up(tmp_path: Path) -> None:
    """The system does it: nothing is left to clean."""
    child = os.fork()
    if child == 0:
        tier, _ = opened(tmp_path)
        write(tier, 1)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)

    tier, names = opened(tmp_path)

    assert tier.directory.name == "r0"
    assert names == [name(1)]  # its index was never written
    tier.close()


def test_removed_lock_protects_nothing(tmp_path: Path) -> None:
    """Who held the lock of a directory that was deleted does not keep others from a new one."""
    first, _ = opened(tmp_path)
    (first.directory / "lock").unlink()

    second, _ = opened(tmp_path)

    assert second.directory.name == "r0"
    first.close()
    second.close()


def test_directory_removed_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file that has lost its name keeps nobody out: it is taken again."""
    real, calls = fcntl.flock, 0

    def remove_first(file: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            next(tmp_path.rglob("lock")).unlink()
        real(file, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", remove_first)
        first, _ = opened(tmp_path)
    second, _ = opened(tmp_path)

    assert calls == 2
    assert [tier.directory.name for tier in (first, second)] == ["r0", "r0-1"]
    first.close()
    second.close()


def test_deleted_index_costs_time_only(tmp_path: Path) -> None:
    """The headers say the same, and the order of writing stands in for that of use."""
    tier, _ = opened(tmp_path)
    for age, number in enumerate((3, 1, 2)):
        path = write(tier, number)
        os.utime(path, (age, age))
    tier.close()
    (tier.directory / "index").unlink()

    tier, names = opened(tmp_path)

    assert names == [name(3), name(1), name(2)]
    tier.close()


@pytest.mark.parametrize("damage", ["cut", "header", "elsewhere", "empty"])
def test_file_without_an_entry_is_adopted_only_if_it_is_whole(tmp_path: Path, damage: str) -> None:
    """What is not takes space that nobody counts: it is removed."""
    tier, _ = opened(tmp_path)
    write(tier, 1)
    path = write(tier, 2)
    tier.close()
    (tier.directory / "index").unlink()
    match damage:
        case "cut":
            os.truncate(path, path.stat().st_size - 1)
        case "header":
            path.write_bytes(b"x" + path.read_bytes()[1:])
        case "elsewhere":
            wrong = Path(object_path(str(tier.directory), object_key(name(3))))
            wrong.parent.mkdir(exist_ok=True)
            path = path.rename(wrong)
        case "empty":
            path.write_bytes(b"")

    tier, names = opened(tmp_path)

    assert names == [name(1)]
    assert not path.exists()
    tier.close()


def test_unreadable_file_is_neither_adopted_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files is no reason to delete anything."""
    tier, _ = opened(tmp_path)
    path = write(tier, 1)
    tier.close()
    (tier.directory / "index").unlink()
    real = os.open

    def refuse(place: str, *args: int) -> int:
        if str(place).endswith(".opal"):
            raise OSError(24, "too many open files")
        return real(place, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        tier, names = opened(tmp_path)
        tier.close()
    assert names == []
    assert path.exists()

    tier, names = opened(tmp_path)
    assert names == [name(1)]
    tier.close()


def test_other_row_size_finds_nothing(tmp_path: Path) -> None:
    """Files of rows of another size cannot be read, and leave."""
    tier, _ = opened(tmp_path)
    path = write(tier, 1)
    tier.close()

    tier, names = opened(tmp_path, row_bytes=8192)

    assert names == []
    assert not path.exists()
    tier.close()


def test_leftovers_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    """By id and start time, whatever the age; the index's temporaries too."""
    tier, _ = opened(tmp_path)
    folder = write(tier, 1).parent
    tier.close()
    program = "from opal_connector.tiers.file_names import *; print(new_temporary_name())"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.strip()
    dead = [folder / output, tier.directory / output]
    living = [folder / new_temporary_name(), tier.directory / new_temporary_name()]
    for path in (*dead, *living):
        path.touch()

    tier, _ = opened(tmp_path)

    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in living)
    tier.close()


def test_calls_after_close_do_no_harm(tmp_path: Path) -> None:
    """A write that hung may end later; its file is found at the next start."""
    tier, _ = opened(tmp_path)
    tier.close()
    write(tier, 1)
    tier.touch([object_key(name(1))])
    tier.flush()
    tier.close()

    tier, names = opened(tmp_path)

    assert names == [name(1)]
    tier.close()


def test_models_that_nobody_serves_make_room(tmp_path: Path) -> None:
    """What an older model left behind is removed, the oldest first, beyond half of the limit."""

    def filled(number: int) -> LocalNVMe:
        store = LocalNVMe(tmp_path, row_bytes=4096, rank=0)
        list(store.open(bytes([number]) * 32))
        rows = np.zeros((1, 4096), dtype=np.uint8)
        for block in range(10):
            run = bytes([block]) * 32
            name = ObjectName(0, CHAIN_ROOT, run)
            store.write_object(name, rows, [0], [row_check(rows[0], run, 0)])
        return store

    for number in (1, 2):
        filled(number).close()
        index = next((tmp_path / (bytes([number]) * 8).hex()).rglob("index"))
        for path in (index, *index.parent.rglob("*.opal")):
            os.utime(path, (1000 * number, 1000 * number))
    in_use = filled(3)
    size = file_bytes(1, 4096)

    store = LocalNVMe(tmp_path, row_bytes=4096, rank=0, limit_bytes=50 * size)
    list(store.open(bytes([4]) * 32))

    left = {path.name for path in tmp_path.iterdir() if list(path.rglob("*.opal"))}
    assert left == {(bytes([number]) * 8).hex() for number in (2, 3)}
    assert store.foreign_bytes <= 25 * size
    in_use.close()
    store.close()


# What lies beside a rank's own objects.

OWN_SPACE = NAMESPACE.hex()[:16]
BYTES = 65_536  # a whole number of the blocks of any filesystem


def put(root: Path, place: str, size: int = BYTES) -> None:
    """A file of some size, wherever it may lie."""
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def foreign_bytes(root: Path, *, rank: int = 0, local_ranks: int = 1) -> int:
    """What a rank that has written nothing reports, without its own lock and index."""
    tier = LocalNVMe(root, row_bytes=ROW_BYTES, rank=rank, local_ranks=local_ranks)
    assert list(tier.open(NAMESPACE)) == []
    own = sum(path.stat().st_blocks * 512 for path in tier.directory.iterdir() if path.is_file())
    tier.close()
    return tier.foreign_bytes - own


def test_other_ranks_of_an_engine_are_not_foreign(tmp_path: Path) -> None:
    """They have shares of the disk of their own: what is in them must not be subtracted twice."""
    for rank in (1, 2, 17):
        put(tmp_path, f"{OWN_SPACE}/{slot_name(rank, 0)}/ab/object")
        put(tmp_path, f"{OWN_SPACE}/{slot_name(rank, 0)}/index")

    assert foreign_bytes(tmp_path) == 0


def test_ranks_of_the_second_engine_know_each_other_by_their_slot(tmp_path: Path) -> None:
    """Beside a living engine all of them have slot 1: what it has is foreign, and theirs is not."""
    first, _ = opened(tmp_path)
    put(tmp_path, f"{OWN_SPACE}/{slot_name(1, 0)}/ab/object", 3 * BYTES)
    put(tmp_path, f"{OWN_SPACE}/{slot_name(1, 1)}/ab/object")
    of_first = sum(path.stat().st_blocks * 512 for path in first.directory.rglob("*"))
    of_folders = sum(
        path.stat().st_blocks * 512 for path in first.directory.rglob("*") if path.is_dir()
    )

    assert foreign_bytes(tmp_path) == 3 * BYTES + of_first - of_folders
    first.close()


@pytest.mark.parametrize(
    "place",
    [
        f"{OWN_SPACE}/r1-1/ab/object",  # another process, alive or dead
        f"{OWN_SPACE}/r0-3/ab/object",
        f"{OWN_SPACE}/r1-0/ab/object",  # nobody's: slot 0 has no number in its name
        f"{OWN_SPACE}/r01/ab/object",
        f"{OWN_SPACE}/notes/r1/object",
        f"{OWN_SPACE}/object",
        "0123456789abcdef/r0/ab/object",  # other models
        "0123456789abcdef/r1/ab/object",
        "r1/ab/object",
        "notes",
    ],
)
def test_whatever_is_not_of_this_engine_is_foreign(tmp_path: Path, place: str) -> None:
    """Other slots, other namespaces, and what people put there."""
    put(tmp_path, place)

    assert foreign_bytes(tmp_path) == BYTES


def test_foreign_bytes_are_shared_by_the_ranks(tmp_path: Path) -> None:
    """What others have leaves less for all ranks together: none of them loses all of it."""
    put(tmp_path, "notes", 4 * BYTES)

    assert foreign_bytes(tmp_path, local_ranks=4) == BYTES
    assert foreign_bytes(tmp_path, rank=3, local_ranks=4) == BYTES


def test_strange_files_in_a_rank_are_its_own_to_bear(tmp_path: Path) -> None:
    """They lie in the part of the disk that this rank fills, and no other rank counts them."""
    put(tmp_path, f"{OWN_SPACE}/r0/strange", 4 * BYTES)
    tier = LocalNVMe(tmp_path, row_bytes=ROW_BYTES, rank=0, local_ranks=4)
    list(tier.open(NAMESPACE))

    assert 4 * BYTES <= tier.foreign_bytes <= 5 * BYTES  # with lock and index
    assert foreign_bytes(tmp_path, rank=1, local_ranks=4) == 0
    tier.close()


def test_other_ranks_do_not_make_other_models_leave(tmp_path: Path) -> None:
    """Room is made for the whole limit, of which what the own ranks hold is the use."""
    other = LocalNVMe(tmp_path, row_bytes=ROW_BYTES, rank=0)
    list(other.open(bytes(32)))
    paths = [write(other, number) for number in range(16)]
    other.close()
    of_other = sum(path.stat().st_blocks * 512 for path in paths)
    put(tmp_path, f"{OWN_SPACE}/r1/ab/object", 20 * BYTES)

    def start(limit_bytes: int) -> None:
        tier = LocalNVMe(
            tmp_path, row_bytes=ROW_BYTES, rank=0, local_ranks=2, limit_bytes=limit_bytes
        )
        list(tier.open(NAMESPACE))
        tier.close()

    start(3 * of_other)
    assert all(path.exists() for path in paths)  # less than half of the limit, if not of a share
    start(of_other)
    assert not any(path.exists() for path in paths)
