"""What every tier of files does across restarts, crashes and processes; see `file_tier_suite`."""

import contextlib
import errno
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from fakes import stamp
from file_tier_fault_suite import FileTierFaultSuite
from file_tier_suite import NAMESPACE, Pool, key, make_name, object_bytes

from opal_connector.tiers import ChecksumMismatchError
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError
from opal_connector.tiers.file_names import LEFTOVER_SECONDS, object_key
from opal_connector.tiers.file_tier import FileTier
from opal_connector.transfers import ObjectName

ROW_BYTES = 4096
SYSTEM_CALLS = [
    "open", "close", "mkdir", "pwrite", "pwritev", "preadv", "pread", "fstat", "stat", "fsync",
    "ftruncate", "rename", "link", "unlink", "utime", "listdir",
]  # fmt: skip


def in_child(run: Callable[[], None]) -> int:
    """Run in a forked process; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001 - the parent must hear of any
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(step: int) -> None:
    """Let this process be killed at its system call of that number, counted from 0."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return real(*args, **kwargs)

        return run

    for name in SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))


class FileTierCrashSuite(FileTierFaultSuite):
    """Inherit this one: it has the other suites' tests too."""

    def let_a_minute_pass(self, root: Path) -> None:
        """Make all that happened a minute older, around the class."""

    def opened(self, root: Path) -> tuple[FileTier, list[ObjectName]]:
        tier = self.make(root, ROW_BYTES)
        return tier, [name for page in tier.open(NAMESPACE) for name in page]

    @contextlib.contextmanager
    def using(self, root: Path) -> Iterator[FileTier]:
        tier, _ = self.opened(root)
        yield tier
        tier.close()

    # Restarts.

    def test_order_of_use_survives_a_restart(self, tmp_path: Path) -> None:
        """Of writes and touches alike, over two restarts."""
        pool = Pool(ROW_BYTES)
        with self.using(tmp_path) as tier:
            for number in range(5):
                pool.write(tier, make_name(number))
                self.let_a_minute_pass(tmp_path)
            for number in (3, 1):
                tier.touch([key(number)])
                self.let_a_minute_pass(tmp_path)
        with self.using(tmp_path) as tier:
            tier.touch([key(0), key(77)])
            self.let_a_minute_pass(tmp_path)
            tier.remove_object(make_name(4))

        tier, names = self.opened(tmp_path)

        assert names == [make_name(number) for number in (2, 3, 1, 0)]
        for name in names:
            pool.read(tier, name)
        tier.close()

    def test_pages_are_bounded_and_complete(self, tmp_path: Path) -> None:
        """At most 512 names each, every object once."""
        pool = Pool(ROW_BYTES)
        wanted = {object_key(name := make_name(number, 1)): name for number in range(1030)}
        with self.using(tmp_path) as tier:
            for name in wanted.values():
                pool.write(tier, name)
        tier = self.make(tmp_path, ROW_BYTES)

        pages = list(tier.open(NAMESPACE))

        assert all(0 < len(page) <= 512 for page in pages)
        assert {object_key(name): name for page in pages for name in page} == wanted
        assert sum(map(len, pages)) == 1030
        tier.close()

    def test_foreign_bytes_are_what_else_lies_there(self, tmp_path: Path) -> None:
        """Other namespaces, other people's files; not this rank's own objects."""
        pool = Pool(ROW_BYTES)
        tier, _ = self.opened(tmp_path)
        pool.write(tier, make_name(1))
        alone = tier.foreign_bytes
        tier.close()
        with self.using(tmp_path) as tier:
            alone = tier.foreign_bytes
        (tmp_path / "notes.txt").write_bytes(bytes(10_000))
        (tmp_path / NAMESPACE.hex()[:16] / "r0" / "strange").write_bytes(bytes(4096))
        other = self.make(tmp_path, ROW_BYTES, rank=7)
        assert list(other.open(bytes(32))) == []
        pool.write(other, make_name(1))
        other.close()
        bookkeeping = sum(
            path.stat().st_blocks * 512 for path in other.directory.iterdir() if path.is_file()
        )

        with self.using(tmp_path) as tier:
            found = tier.foreign_bytes - alone

        assert found == 12_288 + 4096 + bookkeeping + object_bytes(ROW_BYTES)

    def test_strange_files_do_not_stop_a_start(self, tmp_path: Path) -> None:
        """Whatever somebody puts there: the objects are found, and the rest is let be."""
        pool = Pool(ROW_BYTES)
        with self.using(tmp_path) as tier:
            pool.write(tier, make_name(1))
        folder = self.raw_path(tier, make_name(1)).parent
        (folder / "README").write_text("hello")
        (folder / "subdirectory").mkdir()
        (folder / f"{folder.name}{'0' * 62}-g0.opal").mkdir()
        (tier.directory / "zz").mkdir()
        (tier.directory / "zz" / "file").touch()
        (tier.directory / "ab").symlink_to("nowhere")

        again, names = self.opened(tmp_path)

        assert names == [make_name(1)]
        pool.read(again, make_name(1))
        assert (folder / "README").exists()
        again.close()

    def test_index_files_are_never_believed_over_files(self, tmp_path: Path) -> None:
        """Files that vanished and files that came: the inventory is what is there."""
        pool = Pool(ROW_BYTES)
        with self.using(tmp_path) as tier:
            for number in range(4):
                pool.write(tier, make_name(number))
                self.let_a_minute_pass(tmp_path)
        path = self.raw_path(tier, make_name(3))
        data = path.read_bytes()
        path.unlink()
        with self.using(tmp_path):
            pass
        path.write_bytes(data)
        self.raw_path(tier, make_name(0)).unlink()

        again, names = self.opened(tmp_path)

        assert names == [make_name(number) for number in (1, 2, 3)]
        pool.read(again, make_name(3))
        again.close()

    def test_old_leftovers_of_other_hosts_go_and_young_ones_stay(self, tmp_path: Path) -> None:
        """An hour by the clock of the filesystem."""
        pool = Pool(ROW_BYTES)
        with self.using(tmp_path) as tier:
            pool.write(tier, make_name(1))
        folder = self.raw_path(tier, make_name(1)).parent
        young, old = folder / f".tmp-1-1-1-{'0' * 16}", folder / f".tmp-1-1-2-{'0' * 16}"
        young.touch()
        old.touch()
        os.utime(old, (0, young.stat().st_mtime - LEFTOVER_SECONDS - 10))

        again, names = self.opened(tmp_path)

        again.close()
        assert names == [make_name(1)]
        assert self.raw_temporaries(tmp_path) == [young]

    # Crashes.

    def test_ht_54_killed_at_every_step(self, tmp_path: Path) -> None:
        """Whole or absent, whatever was under way; what was there before stays readable."""
        pool = Pool(ROW_BYTES)
        old, new = [make_name(number) for number in range(3)], make_name(10)
        replaced, removed = old[1], old[2]
        step = 0
        while True:
            root = tmp_path / str(step)
            with self.using(root) as tier:
                for name in old:
                    pool.write(tier, name)

            def work(root: Path = root, step: int = step) -> None:
                die_at(step)
                tier, _ = self.opened(root)
                pool.write(tier, new)
                pool.write(tier, replaced, [7, 6, 5, 4, 3, 2])
                tier.touch([object_key(old[0])])
                tier.flush()
                tier.remove_object(removed)
                pool.write(tier, make_name(11))
                tier.close()

            status = in_child(work)
            assert status in (0, -signal.SIGKILL), f"step {step}"
            self.expect_consistent(root, must=old[:2], may=[*old, new, make_name(11)])
            if status == 0:
                break
            step += 1
        assert step > 30

    def expect_consistent(self, root: Path, must: list[ObjectName], may: list[ObjectName]) -> None:
        """The inventory is what can be read, and new work is possible."""
        pool = Pool(ROW_BYTES)
        tier, names = self.opened(root)
        assert len(set(names)) == len(names)
        assert set(must) <= set(names) <= set(may)
        for name in may:
            if name in names:
                pool.read(tier, name)
            else:
                with pytest.raises(ObjectGoneError):
                    pool.read(tier, name)
        pool.write(tier, make_name(50))
        tier.remove_object(make_name(50))
        tier.close()
        assert self.names_after_restart(tier) == names

    def test_ht_54_name_reused_before_a_crash(self, tmp_path: Path) -> None:
        """What took an object's place before the crash is never served as that object."""
        pool = Pool(ROW_BYTES)
        with self.using(tmp_path) as tier:
            pool.write(tier, make_name(1))
        other = make_name(1, parent=998)

        def work() -> None:
            tier, _ = self.opened(tmp_path)
            pool.write(tier, other)
            os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(work) == -signal.SIGKILL
        tier, _ = self.opened(tmp_path)

        with pytest.raises(ChecksumMismatchError):
            pool.read(tier, make_name(1))
        pool.read(tier, other)
        tier.close()

    # Processes.

    def test_processes_share_a_root(self, tmp_path: Path) -> None:
        """They write, read and remove the same objects: whole ones or none."""
        children = []
        for worker in range(3):
            child = os.fork()
            if child == 0:
                try:
                    self.work_beside_others(tmp_path, worker)
                except BaseException:  # noqa: BLE001 - the parent must hear of any
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

        assert statuses == [0, 0, 0]
        assert self.raw_temporaries(tmp_path) == []
        tier, names = self.opened(tmp_path)
        for name in names:
            Pool(ROW_BYTES).read(tier, name)
        tier.close()

    def work_beside_others(self, root: Path, worker: int) -> None:
        pool = Pool(ROW_BYTES)
        tier, _ = self.opened(root)
        for turn in range(60):
            name = make_name((turn * (worker + 1)) % 7)
            pool.write(tier, name)
            with contextlib.suppress(ObjectGoneError):  # another one removed it
                pool.read(tier, make_name(turn % 7))
            tier.touch([object_key(name)])
            if turn % 3 == 0:
                tier.remove_object(make_name(turn % 5))
        tier.close()

    # A disk that is really full.

    def test_ht_59_filesystem_of_a_mebibyte(self, tmp_path: Path) -> None:
        """Stores are refused, loads go on, no temporary stays, space that returns is used."""
        root = tmp_path / "small"
        root.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(root)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("mounting a filesystem is not allowed here")
        try:
            self.fill_up(root)
        finally:
            subprocess.run(["umount", str(root)], check=True)

    def fill_up(self, root: Path) -> None:
        pool = Pool(ROW_BYTES)
        tier, _ = self.opened(root)
        stored: list[ObjectName] = []
        while len(stored) < 1000:
            try:
                pool.write(tier, make_name(len(stored)))
            except NoSpaceError:
                break
            stored.append(make_name(len(stored)))
        assert 20 < len(stored) < 60
        with pytest.raises(NoSpaceError):
            pool.write(tier, make_name(500))
        assert self.raw_temporaries(root) == []
        for name in stored:
            pool.read(tier, name)

        tier.remove_object(stored.pop())
        tier.remove_object(stored.pop(0))
        tier.probe()
        pool.write(tier, make_name(500))

        assert set(self.names_after_restart(tier)) == {*stored, make_name(500)}

    def test_unwritable_root_is_an_error_at_the_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller hears of it at once, and not with every store."""
        real = os.open

        def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(errno.EACCES, "injected", path)
            return real(path, flags, *args, **kwargs)

        tier = self.make(tmp_path / "root", ROW_BYTES)
        monkeypatch.setattr(os, "open", refuse)

        with pytest.raises(OSError, match="injected"):
            list(tier.open(sha256(stamp(1)).digest()))
        tier.close()
