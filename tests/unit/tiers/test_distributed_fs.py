"""What only `DistributedFS` does: one directory for all, recency by the server's clock."""

import os
from hashlib import sha256
from pathlib import Path

import pytest
from fakes import FakeClock, stamp

from opal_connector.tiers import allocate_host_rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.distributed_fs import DistributedFS
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.file_names import new_temporary_name, object_key, object_path
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
ROW_BYTES = 4096
ROWS = allocate_host_rows(row_count=1, row_bytes=ROW_BYTES)


def name(number: int) -> ObjectName:
    return ObjectName(0, stamp(999), stamp(number))


def opened(root: Path, clock: FakeClock | None = None) -> tuple[DistributedFS, list[ObjectName]]:
    tier = DistributedFS(root, row_bytes=ROW_BYTES, rank=0, clock=clock or FakeClock())
    return tier, [name for page in tier.open(NAMESPACE) for name in page]


def write(tier: DistributedFS, number: int) -> Path:
    tier.write_object(name(number), ROWS, [0], [row_check(ROWS[0], name(number).run, 0)])
    return Path(object_path(str(tier.directory), object_key(name(number))))


def read(tier: DistributedFS, number: int) -> None:
    tier.read_object(name(number), [0], allocate_host_rows(row_count=1, row_bytes=4096), [0])


def test_instances_see_each_others_objects(tmp_path: Path) -> None:
    """What one writes another reads at once; what one removes is gone for the other."""
    first, _ = opened(tmp_path)
    second, _ = opened(tmp_path)
    write(first, 1)

    read(second, 1)
    assert opened(tmp_path)[1] == [name(1)]
    second.remove_object(name(1))

    with pytest.raises(ObjectGoneError):
        read(first, 1)
    first.touch([object_key(name(1))])  # no error, and nothing comes back
    assert opened(tmp_path)[1] == []


def test_file_is_stamped_at_most_once_a_minute(tmp_path: Path) -> None:
    """A hot prefix does not become a flood of requests to the server."""
    clock = FakeClock()
    tier, _ = opened(tmp_path, clock)
    path, other = write(tier, 1), write(tier, 2)
    keys = [object_key(name(1))]

    def is_stamped() -> bool:
        stamped = path.stat().st_mtime != 1
        os.utime(path, (1, 1))
        os.utime(other, (1, 1))
        return stamped

    is_stamped()
    tier.touch(keys * 3)
    assert is_stamped()
    clock.now += 59
    tier.touch(keys)
    assert not is_stamped()
    tier.touch([object_key(name(2))])
    assert other.stat().st_mtime != 1
    clock.now += 1
    tier.touch(keys)

    assert is_stamped()


def test_what_is_remembered_of_stamps_is_bounded(tmp_path: Path) -> None:
    """Old ones are forgotten when there are many."""
    clock = FakeClock()
    tier, _ = opened(tmp_path, clock)
    for start in range(0, 140_000, 70_000):
        tier.touch([number.to_bytes(34, "big") for number in range(start, start + 70_000)])
        clock.now += 60

    assert len(tier._stamped) == 70_000


def test_damaged_files_are_left_and_counted(tmp_path: Path) -> None:
    """They may be whole for an instance of another version; no start deletes what is shared."""
    tier, _ = opened(tmp_path)
    write(tier, 1)
    path = write(tier, 2)
    path.write_bytes(b"x" + path.read_bytes()[1:])

    again, names = opened(tmp_path)

    assert names == [name(1)]
    assert path.exists()
    assert again.foreign_bytes == path.stat().st_blocks * 512


def test_process_ids_say_nothing_on_a_shared_directory(tmp_path: Path) -> None:
    """A host of the same name may be another one: a dead process's file waits for its hour."""
    tier, _ = opened(tmp_path)
    folder = write(tier, 1).parent
    parts = new_temporary_name().split("-")
    dead = folder / "-".join([parts[0], parts[1], "1", *parts[3:]])
    dead.touch()

    opened(tmp_path)
    assert dead.exists()
    os.utime(dead, (1, 1))
    opened(tmp_path)

    assert not dead.exists()
