"""What every tier of files does. One subclass per tier supplies a factory and raw accessors.

The accessors go around the class, so that a test can do to the files what a disk, a neighbour or a
crash does. The suite's docstrings are the specification; the suites of faults
and of crashes go on where this one ends.
"""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import content, stamp

from opal_connector.tiers import allocate_host_rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_errors import ObjectGoneError
from opal_connector.tiers.file_names import object_key
from opal_connector.tiers.file_tier import FileTier, file_bytes
from opal_connector.transfers import ObjectName

NAMESPACE = sha256(b"namespace").digest()
ROW_SIZES = [4096, 1000, 8192 + 24]  # one for direct I/O, two that need padding
POOL_ROWS = 16
OBJECT_ROWS = 6  # of all members together


class Shape:
    """Of the objects of the suite that runs now.

    Mutable state: `members`, set by the suite's fixture.
    """

    members = 1


def make_name(
    number: int, blocks: int | None = None, *, parent: int = 999, group: int = 0
) -> ObjectName:
    """The object that tests know by this number; of `OBJECT_ROWS` rows unless it says otherwise."""
    blocks = OBJECT_ROWS // Shape.members if blocks is None else blocks
    run = b"".join(stamp(1000 * number + block) for block in range(blocks))
    return ObjectName(group, stamp(parent), run, Shape.members)


def object_bytes(row_bytes: int) -> int:
    """The size of the file of an object of `OBJECT_ROWS` rows."""
    return file_bytes(OBJECT_ROWS // Shape.members, row_bytes, Shape.members)


def key(number: int) -> bytes:
    return object_key(make_name(number))


class Pool:
    """Rows in memory, and objects of known content in them."""

    def __init__(self, row_bytes: int) -> None:
        self.rows = allocate_host_rows(row_count=POOL_ROWS, row_bytes=row_bytes)
        self.row_bytes = row_bytes

    def wanted(self, name: ObjectName, position: int) -> np.ndarray:
        return content(name.stamps[32 * position :][:32], row_bytes=self.row_bytes)

    def write(
        self, tier: FileTier, name: ObjectName, rows: Sequence[int] | None = None, **kwargs: Any
    ) -> int:
        """Fill the rows with the object's content and write it."""
        rows = range(name.row_count) if rows is None else rows
        for position, row in enumerate(rows):
            self.rows[row] = self.wanted(name, position)
        checks = [row_check(self.rows[row], name.stamps, at) for at, row in enumerate(rows)]
        return tier.write_object(name, self.rows, rows, checks, **kwargs)

    def read(
        self,
        tier: FileTier,
        name: ObjectName,
        positions: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
    ) -> None:
        """Read into rows and compare every byte with the content."""
        positions = range(name.row_count) if positions is None else positions
        rows = range(len(positions)) if rows is None else rows
        self.rows[...] = 0xA5
        checks = tier.read_object(name, positions, self.rows, rows)
        for position, row, check in zip(positions, rows, checks, strict=True):
            assert np.array_equal(self.rows[row], self.wanted(name, position)), position
            assert check == row_check(self.rows[row], name.stamps, position)
        untouched = set(range(POOL_ROWS)) - set(rows)
        assert all(np.all(self.rows[row] == 0xA5) for row in untouched)


class FileTierSuite:
    """Inherit, name the class `Test...`, and supply the methods below."""

    members = 1  # of all objects

    @pytest.fixture(autouse=True)
    def shape(self) -> Iterator[None]:
        """Let all objects of a test have so many members."""
        Shape.members = self.members
        yield
        Shape.members = 1

    def make(self, root: Path, row_bytes: int, rank: int = 0) -> FileTier:
        """A tier that was not opened yet."""
        raise NotImplementedError

    def raw_path(self, tier: FileTier, name: ObjectName) -> Path:
        """The object's file, around the class."""
        raise NotImplementedError

    def raw_temporaries(self, root: Path) -> list[Path]:
        """Temporary files under the root, around the class."""
        raise NotImplementedError

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name in vars(cls):
                if name.startswith("test_") and name in vars(base):
                    raise TypeError(f"{cls.__name__} overrides {name}: the suite is for all tiers")

    @pytest.fixture(params=ROW_SIZES)
    def row_bytes(self, request: pytest.FixtureRequest) -> int:
        return int(request.param)

    @pytest.fixture
    def pool(self, row_bytes: int) -> Pool:
        return Pool(row_bytes)

    @pytest.fixture
    def tier(self, tmp_path: Path, row_bytes: int) -> Iterator[FileTier]:
        tier = self.make(tmp_path / "root", row_bytes)
        assert list(tier.open(NAMESPACE)) == []
        yield tier
        tier.close()

    def names_after_restart(self, tier: FileTier) -> list[ObjectName]:
        """What another process would find, the least recently used first."""
        tier.close()
        again = self.make(tier.root, tier.row_bytes, tier.rank)
        names = [name for page in again.open(NAMESPACE) for name in page]
        again.close()
        return names

    # What was written is read.

    @pytest.mark.parametrize(
        ("source_rows", "positions", "into_rows"),
        [
            ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
            ([9, 2, 14, 3, 4, 5], [0, 1, 2, 3, 4, 5], [15, 3, 0, 7, 6, 1]),
            ([5, 4, 3, 2, 1, 0], [0], [8]),
            ([0, 1, 2, 3, 4, 5], [5], [8]),
            ([0, 1, 2, 3, 4, 5], [1, 2, 5], [5, 6, 7]),
            ([0, 1, 2, 3, 4, 5], [2, 3], [9, 3]),
            ([0, 1, 2, 3, 4, 5], [5, 0, 2], [1, 2, 3]),
            ([0, 1, 2, 3, 4, 5], [], []),
        ],
        ids=["all", "scattered", "first", "last", "hole", "middle", "any-order", "header-only"],
    )
    def test_what_was_written_is_read(
        self,
        tier: FileTier,
        pool: Pool,
        source_rows: list[int],
        positions: list[int],
        into_rows: list[int],
    ) -> None:
        """From any rows, in any part, into any rows and no other."""
        written = pool.write(tier, make_name(1), source_rows)

        assert written == object_bytes(pool.row_bytes)
        assert self.raw_path(tier, make_name(1)).stat().st_size == written
        pool.read(tier, make_name(1), positions, into_rows)

    @pytest.mark.parametrize("blocks", [1, 2, 100])
    def test_object_of_any_length(self, tier: FileTier, row_bytes: int, blocks: int) -> None:
        """Also with a header of several pages and more buffers than one system call takes."""
        name = make_name(1, blocks)
        pool, count = Pool(row_bytes), name.row_count
        pool.rows = allocate_host_rows(row_count=count, row_bytes=row_bytes)

        pool.write(tier, name)

        into = np.zeros_like(pool.rows)
        tier.read_object(name, range(count), into, range(count)[::-1])
        assert np.array_equal(into[::-1], pool.rows)

    def test_more_rows_than_a_system_call_takes(self, tier: FileTier, row_bytes: int) -> None:
        """The kernel takes 1024 buffers at once; an object may have more."""
        name = make_name(1, 1101 // Shape.members)
        count = name.row_count
        rows = allocate_host_rows(row_count=2 * count, row_bytes=row_bytes)
        rows[:, :8] = np.arange(2 * count, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
        sources = range(0, 2 * count, 2)
        checks = [row_check(rows[row], name.stamps, at) for at, row in enumerate(sources)]
        tier.write_object(name, rows, sources, checks)
        into = allocate_host_rows(row_count=2 * count, row_bytes=row_bytes)

        assert tier.read_object(name, range(count), into, sources) == checks

        assert np.array_equal(into[::2], rows[::2])

    def test_rows_anywhere_in_memory(self, tier: FileTier, row_bytes: int) -> None:
        """A pool that begins at an odd address is as good, only slower."""
        pool, name = Pool(row_bytes), make_name(1)
        flat = np.zeros(POOL_ROWS * row_bytes + 1, dtype=np.uint8)
        pool.rows = flat[1:].reshape(POOL_ROWS, row_bytes)

        pool.write(tier, name)

        pool.read(tier, name)

    def test_filesystem_without_direct_io(
        self, tmp_path: Path, row_bytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Found out once, and all goes through the page cache."""
        real, flagged = os.open, []

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_DIRECT:
                flagged.append(path)
                raise OSError(errno.EINVAL, "no direct I/O here")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
        tier, pool = self.make(tmp_path, row_bytes), Pool(row_bytes)
        assert list(tier.open(NAMESPACE)) == []
        pool.write(tier, make_name(1))
        pool.read(tier, make_name(1))
        tier.probe()
        tier.close()

        assert len(flagged) == 1
        assert self.raw_temporaries(tmp_path) == []

    def test_written_again_is_replaced(self, tier: FileTier, pool: Pool) -> None:
        """The last write counts."""
        pool.write(tier, make_name(1))
        pool.write(tier, make_name(1), [7, 6, 5, 4, 3, 2])

        pool.read(tier, make_name(1))
        assert self.names_after_restart(tier) == [make_name(1)]

    def test_groups_and_ranks_and_namespaces_are_apart(
        self, tier: FileTier, pool: Pool, tmp_path: Path, row_bytes: int
    ) -> None:
        """The same hashes in another group, of another rank, in another namespace: no hit."""
        pool.write(tier, make_name(1))
        other_rank = self.make(tmp_path / "root", row_bytes, rank=1)
        other_namespace = self.make(tmp_path / "root", row_bytes)
        assert list(other_rank.open(NAMESPACE)) == []
        assert list(other_namespace.open(sha256(b"other").digest())) == []

        for one, name in (
            (tier, make_name(1, group=1)),
            (other_rank, make_name(1)),
            (other_namespace, make_name(1)),
        ):
            with pytest.raises(ObjectGoneError):
                pool.read(one, name)
        other_rank.close()
        other_namespace.close()

    def test_only_the_owner_may_look(self, tier: FileTier, pool: Pool) -> None:
        """Somebody's prompt is in there: directories 0700, files 0600."""
        pool.write(tier, make_name(1))
        tier.flush()

        paths = [tier.root, *tier.root.rglob("*")]
        assert len(paths) >= 4
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path

    # Objects that go.

    def test_removed_object_is_gone(self, tier: FileTier, pool: Pool) -> None:
        """Removing twice, or what never was, is no error."""
        pool.write(tier, make_name(1))
        pool.write(tier, make_name(2))

        for number in (1, 1, 3):
            tier.remove_object(make_name(number))

        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))
        assert self.names_after_restart(tier) == [make_name(2)]

    def test_ht_55_other_object_under_the_name_is_not_removed(
        self, tier: FileTier, pool: Pool
    ) -> None:
        """Who asks to remove an object removes that one, and not what took its place."""
        other = make_name(1, parent=998)
        pool.write(tier, other)

        tier.remove_object(make_name(1))

        pool.read(tier, other)
        assert self.raw_temporaries(tier.root) == []

    def test_ht_55_directory_removed_under_load(self, tier: FileTier, pool: Pool) -> None:
        """Everything is a miss, nothing fails, and the next store makes it again."""
        pool.write(tier, make_name(1))
        self.raw_path(tier, make_name(1)).unlink()
        os.rename(tier.directory, tier.root / "away")

        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))
        tier.remove_object(make_name(1))
        tier.touch([key(1)])
        pool.write(tier, make_name(2))

        pool.read(tier, make_name(2))

    def test_ht_55_file_removed_while_it_is_read(
        self, tier: FileTier, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A read that has begun ends with the object's bytes, also when it is replaced."""
        pool.write(tier, make_name(1))
        real = os.preadv

        def remove_first(*args: Any) -> int:
            tier.remove_object(make_name(1))
            return real(*args)

        monkeypatch.setattr(os, "preadv", remove_first)

        pool.read(tier, make_name(1))

    @pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
    def test_ht_55_vanished_on_a_server_is_gone(
        self, tier: FileTier, pool: Pool, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """A network filesystem says so in the middle of a read."""
        pool.write(tier, make_name(1))

        def vanish(*_: Any) -> int:
            raise OSError(number, "vanished")

        monkeypatch.setattr(os, "preadv", vanish)

        with pytest.raises(ObjectGoneError):
            pool.read(tier, make_name(1))

    # Several at a time.

    def test_threads_on_different_objects(self, tier: FileTier, row_bytes: int) -> None:
        """Writes, reads and removals of different objects do not meet."""
        errors: list[BaseException] = []

        def run(worker: int) -> None:
            pool = Pool(row_bytes)
            try:
                for turn in range(10):
                    name = make_name(100 * worker + turn)
                    pool.write(tier, name)
                    pool.read(tier, name)
                    tier.touch([object_key(name)])
                    if turn % 2:
                        tier.remove_object(name)
            except BaseException as error:  # noqa: BLE001 - the test must hear of any
                errors.append(error)

        threads = [threading.Thread(target=run, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert errors == []
        wanted = {key(100 * worker + turn) for worker in range(6) for turn in range(0, 10, 2)}
        assert {object_key(name) for name in self.names_after_restart(tier)} == wanted
