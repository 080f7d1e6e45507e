"""What instances see of each other in a shared directory, and who leaves when it is full."""

import os
import time
from pathlib import Path

import numpy as np
from fakes import content, stamp

from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers import DistributedFS, SharedDirectory, file_bytes
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_names import object_key, object_path
from opal_connector.transfers import ObjectName

ROW_BYTES = 4096
NAMESPACE = bytes(range(32))
OTHER = bytes(32)
SIZE = file_bytes(1, ROW_BYTES)


def name(number: int, parent: int | None = None) -> ObjectName:
    """An object of one block."""
    return ObjectName(0, CHAIN_ROOT if parent is None else stamp(parent), stamp(number))


def tier(root: Path, namespace: bytes = NAMESPACE, rank: int = 0) -> DistributedFS:
    store = DistributedFS(root, row_bytes=ROW_BYTES, rank=rank)
    list(store.open(namespace))
    return store


def write(store: DistributedFS, *names: ObjectName) -> None:
    """Files with the content of their names, each older than the next."""
    for written in names:
        rows = np.array([content(written.run, row_bytes=ROW_BYTES)])
        store.write_object(written, rows, [0], [row_check(rows[0], written.run, 0)])


def age(store: DistributedFS, written: ObjectName, seconds_ago: int) -> None:
    path = object_path(str(store.directory), object_key(written))
    used = time.time() - seconds_ago
    os.utime(path, (used, used))


def directory(root: Path, limit_files: int, ranks: int = 1) -> SharedDirectory:
    return SharedDirectory(root, namespace=NAMESPACE, ranks=ranks, limit_bytes=limit_files * SIZE)


def nobody_holds(key: bytes) -> bool:
    del key
    return False


def present(root: Path) -> int:
    return len(list(root.rglob("*.opal")))


def test_refresh_tells_what_is_new_and_what_is_gone(tmp_path: Path) -> None:
    """Each change once, whoever made it."""
    store, shared = tier(tmp_path), directory(tmp_path, 100)
    write(store, name(1), name(2, parent=1))

    first = shared.refresh()
    assert set(first.names) == {name(1), name(2, parent=1)}
    assert shared.refresh() == type(first)()
    store.remove_object(name(1))
    write(store, name(3))
    second = shared.refresh()

    assert (second.names, second.gone) == ((name(3),), (object_key(name(1)),))


def test_object_must_be_there_for_every_rank(tmp_path: Path) -> None:
    """HT-63: a hit that only one rank could load would be a failed load."""
    first, second = tier(tmp_path, rank=0), tier(tmp_path, rank=1)
    shared = directory(tmp_path, 100, ranks=2)
    write(first, name(1), name(2))
    write(second, name(1))

    assert shared.present([name(1), name(2)]) == [True, False]
    assert set(shared.refresh().names) | {name(1)} == {name(1)}


def test_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """Before the first write, and after somebody took all of it away."""
    shared = directory(tmp_path / "absent", 100)

    assert shared.refresh().names == ()
    assert shared.present([name(1)]) == [False]


def test_grants_never_pass_the_limit(tmp_path: Path) -> None:
    """Three instances ask at once: together they get no more than there is."""
    instances = [directory(tmp_path, 10) for _ in range(3)]

    granted = [
        shared.renew(wanted_bytes=5 * SIZE, unused_bytes=0, is_held=nobody_holds).granted_bytes
        for shared in instances
    ]

    assert granted == [5 * SIZE, 5 * SIZE, 0]


def test_what_was_not_used_can_be_granted_again(tmp_path: Path) -> None:
    """An instance that leaves gives back what it did not write."""
    one, other = directory(tmp_path, 10), directory(tmp_path, 10)
    one.renew(wanted_bytes=10 * SIZE, unused_bytes=0, is_held=nobody_holds)
    one.leave(unused_bytes=10 * SIZE)

    grant = other.renew(wanted_bytes=10 * SIZE, unused_bytes=0, is_held=nobody_holds)

    assert grant.granted_bytes == 10 * SIZE


def test_longest_unused_leaves_for_a_grant(tmp_path: Path) -> None:
    """By the files' times, which every use renews; no more than it takes."""
    store, shared = tier(tmp_path), directory(tmp_path, 10)
    for number in range(10):
        write(store, name(number))
        age(store, name(number), seconds_ago=1000 - number)
    age(store, name(0), seconds_ago=1)

    grant = shared.renew(wanted_bytes=2 * SIZE, unused_bytes=0, is_held=nobody_holds)

    assert grant.granted_bytes == 2 * SIZE
    assert grant.gone == tuple(object_key(name(number)) for number in (1, 2, 3))
    assert present(tmp_path) == 7


def test_tail_leaves_before_its_head(tmp_path: Path) -> None:
    """A head is older than its tail when both were only written, and must not go first."""
    store, shared = tier(tmp_path), directory(tmp_path, 4)
    chain = [name(0), name(1, parent=0), name(2, parent=1), name(3, parent=2)]
    for number, written in enumerate(chain):
        write(store, written)
        age(store, written, seconds_ago=1000 - number)
    shared.refresh()

    grant = shared.renew(wanted_bytes=SIZE, unused_bytes=0, is_held=nobody_holds)

    assert grant.gone[0] == object_key(chain[3])
    assert not set(grant.gone) & {object_key(chain[0])}


def test_what_is_held_stays(tmp_path: Path) -> None:
    """What this instance has promised or moves now is not what it evicts."""
    store, shared = tier(tmp_path), directory(tmp_path, 3)
    for number in range(3):
        write(store, name(number))
        age(store, name(number), seconds_ago=1000 - number)
    held = object_key(name(0))

    grant = shared.renew(wanted_bytes=SIZE, unused_bytes=0, is_held=lambda key: key == held)

    assert held not in grant.gone
    assert object_key(name(1)) in grant.gone


def test_other_namespaces_count_and_leave_too(tmp_path: Path) -> None:
    """The limit is for the directory: what an older model left behind makes room."""
    old, store = tier(tmp_path, OTHER), tier(tmp_path)
    for number in range(5):
        write(old, name(number))
        age(old, name(number), seconds_ago=5000)
    write(store, name(10), name(11))
    shared = directory(tmp_path, 7)

    grant = shared.renew(wanted_bytes=3 * SIZE, unused_bytes=0, is_held=nobody_holds)

    assert grant.granted_bytes == 3 * SIZE
    assert grant.gone == (), "nothing of this namespace had to go"
    assert present(tmp_path) * SIZE + grant.granted_bytes <= 7 * SIZE


def test_spent_grants_are_remembered_until_a_scan(tmp_path: Path) -> None:
    """Between scans the ledger assumes that all that was granted has been written."""
    one, other = directory(tmp_path, 10), directory(tmp_path, 10)
    store = tier(tmp_path)
    one.renew(wanted_bytes=6 * SIZE, unused_bytes=0, is_held=nobody_holds)
    write(store, *(name(number) for number in range(6)))
    one.renew(wanted_bytes=0, unused_bytes=0, is_held=nobody_holds)

    grant = other.renew(wanted_bytes=4 * SIZE, unused_bytes=0, is_held=nobody_holds)

    assert grant.granted_bytes == 4 * SIZE
    assert (grant.gone, grant.total_bytes) == ((), 10 * SIZE)
