"""`FileTier`: the bytes of one rank and namespace as files in a directory, one per object."""

import contextlib
import errno
import os
import shutil
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from typing_extensions import Buffer, override

from opal_connector.tiers import file_io
from opal_connector.tiers.base import ChecksumMismatchError, Rows
from opal_connector.tiers.checks import row_check
from opal_connector.tiers.file_errors import (
    AbandonedError,
    ObjectGoneError,
    as_gone,
    as_no_space,
)
from opal_connector.tiers.file_names import (
    namespace_name,
    new_temporary_name,
    object_key,
    object_path,
)
from opal_connector.tiers.header_scan import list_directory, read_header
from opal_connector.tiers.keyed_tier import KeyedTier, always
from opal_connector.tiers.object_file import (
    header_size,
    read_record,
    record_buffers,
)
from opal_connector.tiers.record import (
    ALIGNMENT,
    RecordHeader,
    encode_header,
    expect_header,
    expected_checks,
    file_bytes,
)
from opal_connector.transfers import ObjectName

__all__ = ["FileTier", "file_bytes"]


class FileTier(KeyedTier):
    """Objects of one rank and one namespace as files under a directory.

    Mutable state: the namespace, the directory and whether it takes direct I/O, set once by `open`
    before anything else runs; `_foreign_bytes`, set once at its end; `_trash`, of the one call of
    `wipe` at a time; a buffer per thread. Nothing needs a lock: files are written under names that
    nobody else has, and never changed after.
    """

    def __init__(self, root: Path, *, row_bytes: int, rank: int, fsync: bool = False) -> None:
        super().__init__(row_bytes=row_bytes, rank=rank)
        self.root = root
        self._fsync = fsync
        self._directory = ""
        self._takes_direct = False
        self._foreign_bytes = 0
        self._trash: list[str] = []
        self._of_thread = threading.local()

    @property
    def directory(self) -> Path:
        """Where this rank's objects lie. Known when `open` has given its first page."""
        return Path(self._directory)

    @property
    @override
    def foreign_bytes(self) -> int:
        """Bytes of this rank's room that its objects cannot have, as `open` found them."""
        return self._foreign_bytes

    @override
    def open(self, namespace: bytes) -> Iterator[tuple[ObjectName, ...]]:
        """Prepare the directory and give its objects, the least recently used first. Blocks.

        A page has at most 512 names. To use the tier, take all pages.

        Raises:
            OSError: The directory cannot be used.
        """
        os.makedirs(self.root, file_io.DIRECTORY_MODE, exist_ok=True)
        self._namespace = namespace
        self._directory = self._take_directory(namespace)
        self._takes_direct = file_io.supports_direct(self._directory)
        yield from self._inventory()
        self._foreign_bytes = self._count_foreign_bytes()

    @override
    def attach(self, namespace: bytes) -> None:
        """Read the directory that another process of this rank has taken. Blocks.

        Raises:
            OSError: It cannot be used, or none was taken.
        """
        self._namespace = namespace
        self._directory = self._taken_directory(namespace)
        self._takes_direct = file_io.supports_direct(self._directory)

    @override
    def write_object(
        self,
        name: ObjectName,
        rows: Rows,
        tier_rows: Sequence[int],
        checks: Sequence[int],
        *,
        may_publish: Callable[[], bool] = always,
    ) -> int:
        """Write an object of which `rows[tier_rows[i]]` is row i; returns the file's bytes.

        `checks` are the rows' check values, as `read_object` is to find them. `may_publish` is
        asked when all is written and nothing is visible yet. Blocks. After any error nothing of
        this write is left, and what was there under this name before still is.

        Raises:
            AbandonedError: `may_publish` said no.
            NoSpaceError: The medium is full.
            OSError: The medium failed.
        """
        header = encode_header(
            RecordHeader(self._namespace, self.rank, self.row_bytes, name, tuple(checks))
        )
        path = object_path(self._directory, object_key(name))
        folder = os.path.dirname(path)
        temporary = f"{folder}/{new_temporary_name()}"
        try:
            file = self._create(temporary, is_direct=self._is_direct(rows))
            try:
                self._fill(file, record_buffers(self._scratch_of(header), rows, tier_rows))
                if not may_publish():
                    raise AbandonedError(path)
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                raise
            if self._fsync:
                _sync_name(folder, path)
        except OSError as error:
            raise as_no_space(error) from error
        self._published(name)
        return file_bytes(name.block_count, self.row_bytes, name.members)

    @override
    def read_object(
        self, name: ObjectName, positions: Sequence[int], into: Rows, into_rows: Sequence[int]
    ) -> list[int]:
        """Read row `positions[k]` into `into[into_rows[k]]`; returns their check values. Blocks.

        After an error the rows hold anything.

        Raises:
            ChecksumMismatchError: The file is damaged, or of another object.
            ObjectGoneError: There is no file.
            OSError: The medium failed.
        """
        path = object_path(self._directory, object_key(name))
        head = self._scratch(header_size(name))
        try:
            file = file_io.open_for_reading(path, direct=self._is_direct(into))
            try:
                read_record(file, head, name, positions, into, into_rows)
            finally:
                os.close(file)
        except EOFError as error:
            raise ChecksumMismatchError(f"{path} ends too early") from error
        except OSError as error:
            raise as_gone(error) from error
        known = expected_checks(
            head,
            namespace=self._namespace,
            rank=self.rank,
            row_bytes=self.row_bytes,
            name=name,
        )
        checks = [known[position] for position in positions]
        stamps = name.stamps
        for position, row, check in zip(positions, into_rows, checks, strict=True):
            if row_check(into[row], stamps, position) != check:
                raise ChecksumMismatchError(f"row {position} of {path} is damaged")
        return checks

    @override
    def remove_object(self, name: ObjectName) -> None:
        """Remove an object's file, if it is there. Blocks.

        A file that has this name and is another object's stays. What is damaged goes.

        Raises:
            OSError: The medium failed; the file may be there or not.
        """
        key = object_key(name)
        path = object_path(self._directory, key)
        claimed = f"{os.path.dirname(path)}/{new_temporary_name()}"
        # Taken out of sight first: between looking at a file and removing it by its name,
        # somebody may put another one there.
        try:
            os.rename(path, claimed)
        except OSError as error:
            if not isinstance(as_gone(error), ObjectGoneError):
                raise
            self._removed(key)
            return
        if self._is_other_object(claimed, name):
            file_io.put_back(claimed, path)
            return
        os.unlink(claimed)
        self._removed(key)

    @override
    def wipe(self) -> None:
        """Remove every object of this rank and namespace. Blocks.

        They are out of sight at once; should this process die on the way, they do not come back.

        Raises:
            OSError: The medium failed; some are left, or their bytes are.
        """
        trash = f"{self._directory}/{new_temporary_name()}"
        os.mkdir(trash, file_io.DIRECTORY_MODE)
        self._trash.append(trash)
        keys = list_directory(self._directory).keys
        for folder in {os.path.basename(os.path.dirname(object_path("", key))) for key in keys}:
            os.rename(f"{self._directory}/{folder}", f"{trash}/{folder}")
        for key in keys:
            self._removed(key)
        for trash in list(self._trash):  # also what an earlier call could not remove
            try:
                shutil.rmtree(trash)
            except FileNotFoundError:
                if os.path.lexists(trash):
                    raise  # somebody took a part of it away, and the rest is still there
            self._trash.remove(trash)

    @override
    def probe(self) -> None:
        """Write, read and remove a small file. Blocks.

        Raises:
            NoSpaceError: The medium is full.
            OSError: The medium failed.
        """
        temporary = f"{self._directory}/{new_temporary_name()}"
        sent, received = file_io.aligned_buffer(ALIGNMENT), file_io.aligned_buffer(ALIGNMENT)
        sent.write(os.urandom(ALIGNMENT))
        try:
            file = self._create(temporary, is_direct=self._takes_direct)
            try:
                file_io.write_fully(file, [sent], 0)
                os.fsync(file)
                file_io.read_fully(file, [received], 0)
            finally:
                os.close(file)
                os.unlink(temporary)
        except EOFError as error:
            raise OSError(errno.EIO, "the medium forgets what is written", temporary) from error
        except OSError as error:
            raise as_no_space(error) from error
        if sent[:] != received[:]:
            raise OSError(errno.EIO, "the medium gives back other bytes", temporary)

    # What subclasses fill in.

    @abstractmethod
    def _take_directory(self, namespace: bytes) -> str:
        """The directory of this rank, made if need be."""

    def _taken_directory(self, namespace: bytes) -> str:
        """The directory of this rank that another process has taken: the same, where all may."""
        return self._take_directory(namespace)

    @abstractmethod
    def _inventory(self) -> Iterator[tuple[ObjectName, ...]]:
        """The pages of `open`."""

    @abstractmethod
    def _count_foreign_bytes(self) -> int:
        """Bytes of this rank's room that the objects of the inventory cannot have."""

    def _published(self, name: ObjectName) -> None:
        """An object's file is there."""

    def _removed(self, key: bytes) -> None:
        """An object's file is not there."""

    # The rest.

    def _make_directory(self, directory: str) -> None:
        """Make it and what is missing above it, but not the root: that may be a lost mount."""
        root = str(self.root)
        missing = []
        while directory != root and not os.path.isdir(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, file_io.DIRECTORY_MODE)

    def _namespace_directory(self, namespace: bytes) -> str:
        return f"{self.root}/{namespace_name(namespace)}"

    def _create(self, temporary: str, *, is_direct: bool) -> int:
        try:
            return file_io.create(temporary, direct=is_direct)
        except FileNotFoundError:
            self._make_directory(os.path.dirname(temporary))
            return file_io.create(temporary, direct=is_direct)

    def _fill(self, file: int, buffers: Sequence[Buffer]) -> None:
        try:
            file_io.write_fully(file, buffers, 0)
            if self._fsync:
                os.fsync(file)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error says what is wrong
                os.close(file)
            raise
        os.close(file)  # a network filesystem reports a full disk here

    def _scratch(self, size: int) -> memoryview:
        """A page-aligned buffer of this thread, valid until its next call."""
        buffer = getattr(self._of_thread, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = memoryview(file_io.aligned_buffer(size))
            self._of_thread.buffer = buffer
        return buffer[:size]

    def _scratch_of(self, data: bytes) -> memoryview:
        view = self._scratch(len(data))
        view[:] = data
        return view

    def _is_direct(self, rows: Rows) -> bool:
        return self._takes_direct and file_io.allows_direct(rows)

    def _expect(self, header: RecordHeader, name: ObjectName) -> None:
        expect_header(
            header,
            namespace=self._namespace,
            rank=self.rank,
            row_bytes=self.row_bytes,
            name=name,
        )

    def _is_other_object(self, path: str, name: ObjectName) -> bool:
        """Whether the file is whole, belongs where it lies, and is not the object of this name."""
        try:
            header = read_header(path).header
        except OSError:
            return False  # nobody will read it
        # One that lies under a name not its own is nobody's.
        if header is None or object_key(header.name) != object_key(name):
            return False
        try:
            self._expect(header, name)
        except ChecksumMismatchError:
            return True
        return False


def _sync_name(folder: str, path: str) -> None:
    """Have the name of a new file reach the disk; without that, the file goes again."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise
