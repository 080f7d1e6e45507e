"""What every tier of files does about damage and a medium that fails; see `file_tier_suite`."""

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_tier_suite import (
    NAMESPACE,
    OBJECT_ROWS,
    FileTierSuite,
    Pool,
    make_name,
    object_bytes,
)

from opal_connector.tiers import ChecksumMismatchError
from opal_connector.tiers.file_errors import AbandonedError, NoSpaceError, ObjectGoneError
from opal_connector.tiers.file_tier import FileTier


def open_files_under(root: Path) -> int:
    """Descriptors of this process for files there; other threads have others."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))
    return sum(link.startswith(f"{root}/") for link in links)


class FileTierFaultSuite(FileTierSuite):
    """Inherit `FileTierCrashSuite`, which has these tests too."""

    # Damage.

    def damage(self, path: Path, row_bytes: int) -> dict[str, Callable[[], None]]:
        """Ways to spoil a file, by name."""
        size = path.stat().st_size
        header = size - object_bytes(row_bytes) + 4096

        def flip(offset: int) -> Callable[[], None]:
            def run() -> None:
                data = bytearray(path.read_bytes())
                data[offset] ^= 1 << offset % 8
                path.write_bytes(data)

            return run

        return {
            "header-first": flip(0),
            "header-middle": flip(header // 2),
            "header-last": flip(header - 1),
            "namespace": flip(60),
            "payload-first": flip(header),
            "payload-middle": flip((header + size) // 2),
            "payload-last": flip(size - 1),
            "zeroed": lambda: path.write_bytes(bytes(size)) and None,
            "payload-zeroed": lambda: (
                path.write_bytes(path.read_bytes()[:header] + bytes(size - header)) and None
            ),
            "cut-by-one": lambda: os.truncate(path, size - 1),
            "cut-to-header": lambda: os.truncate(path, header),
            "emptied": lambda: os.truncate(path, 0),
            "one-more": lambda: os.truncate(path, size + 1),
            "doubled": lambda: path.write_bytes(path.read_bytes() * 2) and None,
        }

    @pytest.mark.parametrize(
        "kind",
        [
            "header-first", "header-middle", "header-last", "namespace", "payload-first",
            "payload-middle", "payload-last", "zeroed", "payload-zeroed", "cut-by-one",
            "cut-to-header", "emptied", "one-more", "doubled",
        ],
    )  # fmt: skip
    def test_ht_13_damaged_file_is_a_miss_until_it_is_written_again(
        self, tier: FileTier, pool: Pool, kind: str
    ) -> None:
        """Never a wrong byte; the next store repairs it; removing it is possible."""
        pool.write(tier, make_name(1))
        pool.write(tier, make_name(2))
        path = self.raw_path(tier, make_name(1))
        self.damage(path, pool.row_bytes)[kind]()

        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, make_name(1))
        pool.read(tier, make_name(2))

        pool.write(tier, make_name(1))
        pool.read(tier, make_name(1))
        self.damage(path, pool.row_bytes)[kind]()
        tier.remove_object(make_name(1))
        assert not path.exists()

    def test_ht_13_damage_costs_only_what_is_read(self, tier: FileTier, pool: Pool) -> None:
        """A block that is whole is read from a file of which another one is not."""
        pool.write(tier, make_name(1))
        self.damage(self.raw_path(tier, make_name(1)), pool.row_bytes)["payload-first"]()

        pool.read(tier, make_name(1), [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, make_name(1), [0], [0])

    def test_ht_13_swapped_files_are_misses(self, tier: FileTier, pool: Pool) -> None:
        """A whole file under another's name is not believed, and can be removed."""
        names = [make_name(1), make_name(2)]
        first, second = (self.raw_path(tier, name) for name in names)
        for name in names:
            pool.write(tier, name)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)

        for name in names:
            with pytest.raises(ChecksumMismatchError, match="other run"):
                pool.read(tier, name)
            tier.remove_object(name)
            assert not self.raw_path(tier, name).exists()
        assert self.names_after_restart(tier) == []

    def test_ht_13_whole_file_of_elsewhere_is_a_miss(
        self, tier: FileTier, pool: Pool, tmp_path: Path, row_bytes: int
    ) -> None:
        """A file of another namespace, rank, parent or row size under this name."""
        name = make_name(1)
        pool.write(tier, name)
        path = self.raw_path(tier, name)
        sources = {
            "other namespace": (self.make(tmp_path / "a", row_bytes), b"x" * 32, pool, name),
            "other rank": (self.make(tmp_path / "b", row_bytes, 1), NAMESPACE, pool, name),
            "other parent hash": (
                self.make(tmp_path / "c", row_bytes),
                NAMESPACE,
                pool,
                make_name(1, parent=998),
            ),
        }
        if row_bytes % 4096:  # another size in rows of the same stride
            narrow = Pool(row_bytes - 1)
            made = self.make(tmp_path / "d", row_bytes - 1)
            sources["other row size"] = (made, NAMESPACE, narrow, name)
        for message, (other, namespace, its_pool, its_name) in sources.items():
            assert list(other.open(namespace)) == []
            its_pool.write(other, its_name)
            path.write_bytes(self.raw_path(other, its_name).read_bytes())
            other.close()

            with pytest.raises(ChecksumMismatchError, match=message):
                pool.read(tier, name)

    # Failures of the medium.

    @pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.EROFS])
    @pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
    def test_failed_write_leaves_nothing_and_what_was_before(
        self,
        tier: FileTier,
        pool: Pool,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        number: int,
    ) -> None:
        """At any step: the error as it is, no temporary file, the old object still there."""
        pool.write(tier, make_name(1))
        self.fail_in(monkeypatch, call, number)

        with pytest.raises(OSError, match="injected") as raised:
            pool.write(tier, make_name(1), [5, 6, 7, 8, 9, 10])

        monkeypatch.undo()
        assert raised.value.errno == number
        assert not isinstance(raised.value, NoSpaceError | ObjectGoneError)
        assert self.raw_temporaries(tier.root) == []
        pool.read(tier, make_name(1))

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
    @pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
    def test_ht_59_no_space_is_an_error_of_its_own(
        self,
        tier: FileTier,
        pool: Pool,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        number: int,
    ) -> None:
        """The full disk costs this store: no temporary stays, loads go on, space comes back."""
        pool.write(tier, make_name(1))
        self.fail_in(monkeypatch, call, number)
        with pytest.raises(NoSpaceError):
            pool.write(tier, make_name(2))
        with pytest.raises(NoSpaceError):
            pool.write(tier, make_name(3))
        monkeypatch.undo()

        assert self.raw_temporaries(tier.root) == []
        pool.read(tier, make_name(1))
        pool.write(tier, make_name(2))
        assert self.names_after_restart(tier) == [make_name(1), make_name(2)]

    @pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES])
    @pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
    def test_ht_35_failed_read_is_an_error_and_no_miss(
        self,
        tier: FileTier,
        pool: Pool,
        monkeypatch: pytest.MonkeyPatch,
        call: str,
        number: int,
    ) -> None:
        """Gone, damaged and unreadable are three things; no descriptor is lost."""
        pool.write(tier, make_name(1))
        before = open_files_under(tier.root)
        self.fail_in(monkeypatch, call, number)

        with pytest.raises(OSError, match="injected") as raised:
            pool.read(tier, make_name(1), [0], [0])

        monkeypatch.undo()
        assert not isinstance(raised.value, ObjectGoneError)
        assert open_files_under(tier.root) == before
        pool.read(tier, make_name(1))

    def test_ht_59_restart_on_a_full_disk(
        self, tier: FileTier, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No file can be made: what is there is found and read, and a store is refused."""
        pool.write(tier, make_name(1))
        (tier.directory / f".tmp-1-1-1-{'0' * 16}").touch()  # of another host
        tier.close()
        real = os.open

        def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_EXCL:
                raise OSError(errno.ENOSPC, "full", path)
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", full)
        again = self.make(tier.root, tier.row_bytes)

        assert list(again.open(NAMESPACE)) == [(make_name(1),)]
        pool.read(again, make_name(1))
        with pytest.raises(NoSpaceError):
            pool.write(again, make_name(2))
        again.close()

    def test_fsync_that_fails_leaves_nothing(
        self, tmp_path: Path, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of the file or of its name: what is not known to be on the disk does not count."""
        tier = self.make(tmp_path / "synced", pool.row_bytes)
        tier._fsync = True
        assert list(tier.open(NAMESPACE)) == []
        pool.write(tier, make_name(0))
        real, calls = os.fsync, 0

        def fail_later(file: int) -> None:
            nonlocal calls
            calls += 1
            if calls >= wanted:
                raise OSError(errno.EIO, "injected")
            real(file)

        monkeypatch.setattr(os, "fsync", fail_later)
        for wanted in (1, 2):
            calls = 0
            with pytest.raises(OSError, match="injected"):
                pool.write(tier, make_name(wanted))
            with pytest.raises(ObjectGoneError):
                pool.read(tier, make_name(wanted))

        assert self.raw_temporaries(tier.root) == []
        assert self.names_after_restart(tier) == [make_name(0)]

    def test_ht_55_filesystem_without_links(
        self, tier: FileTier, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was taken out of sight and is another's comes back there too."""
        other = make_name(1, parent=998)
        pool.write(tier, other)
        self.fail_in(monkeypatch, "link", errno.EPERM)

        tier.remove_object(make_name(1))

        pool.read(tier, other)
        assert self.raw_temporaries(tier.root) == []

    def fail_in(self, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
        """Let a system call fail; a `close` closes and then fails, as on a network filesystem."""
        real_close = os.close

        def fail(*args: Any, **_: Any) -> Any:
            if call == "close":
                real_close(args[0])
            raise OSError(number, "injected")

        monkeypatch.setattr(os, call, fail)

    def test_short_writes_and_reads_are_continued(
        self, tier: FileTier, pool: Pool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel may move less than was asked."""
        calls = 0

        def shorten(real: Callable[..., int]) -> Callable[..., int]:
            def run(file: int, buffers: list[memoryview], offset: int) -> int:
                nonlocal calls
                calls += 1
                return real(file, [buffers[0][:4096]], offset)

            return run

        monkeypatch.setattr(os, "pwritev", shorten(os.pwritev))
        monkeypatch.setattr(os, "preadv", shorten(os.preadv))

        pool.write(tier, make_name(1))
        pool.read(tier, make_name(1))
        assert calls >= 2 * OBJECT_ROWS

    def test_abandoned_write_is_not_published(self, tier: FileTier, pool: Pool) -> None:
        """Asked when all bytes are in the file: a no leaves what was there before."""
        pool.write(tier, make_name(1))
        asked: list[int] = []

        def is_wanted() -> bool:
            (temporary,) = self.raw_temporaries(tier.root)
            asked.append(temporary.stat().st_size)
            return False

        for name in (make_name(1), make_name(2)):
            with pytest.raises(AbandonedError):
                pool.write(tier, name, may_publish=is_wanted)

        assert asked == [object_bytes(pool.row_bytes)] * 2
        assert self.raw_temporaries(tier.root) == []
        pool.read(tier, make_name(1))
        assert self.names_after_restart(tier) == [make_name(1)]

    def test_probe_tells_whether_the_medium_works(
        self, tier: FileTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It leaves nothing, and says what is wrong."""
        tier.probe()
        for call, number, wanted in (
            ("pwritev", errno.ENOSPC, NoSpaceError),
            ("pwritev", errno.EIO, OSError),
            ("preadv", errno.EIO, OSError),
        ):
            with monkeypatch.context() as patch:
                self.fail_in(patch, call, number)
                with pytest.raises(wanted):
                    tier.probe()

        assert self.raw_temporaries(tier.root) == []

    def test_probe_finds_a_medium_that_forgets(
        self, tier: FileTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What comes back is compared."""

        def forget(file: int, buffers: list[memoryview], offset: int) -> int:
            return sum(map(len, buffers))

        monkeypatch.setattr(os, "preadv", forget)

        with pytest.raises(OSError, match="other bytes"):
            tier.probe()
