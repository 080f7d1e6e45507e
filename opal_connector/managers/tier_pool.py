"""What a tier's space is made of: rows of a pool in memory, or bytes of files."""

from collections.abc import Callable
from typing import Protocol


class Space(Protocol):
    """The room of one tier. Guarded by the owner of the books.

    `frees_later` says that what is given up has to be deleted by a worker first, and stays
    charged until it is. `is_shared` says that others fill it too, and that somebody else keeps the
    limit for all of them.
    """

    frees_later: bool
    is_shared: bool

    @property
    def is_crowded(self) -> bool:
        """Whether others leave no room in it; only a shared one knows."""

    @property
    def used_bytes(self) -> int:
        """Bytes of everything that somebody holds."""

    @property
    def capacity_bytes(self) -> int:
        """The limit for `used_bytes`."""

    def size_bytes(self, block_count: int, members: int = 1) -> int:
        """What an object of so many blocks takes that has so many rows for each."""

    def allocate(
        self, block_count: int, members: int = 1, *, force: bool = False
    ) -> tuple[int, ...] | None:
        """The places of an object's rows, or None and no change.

        With `force` also beyond the limit, for what is there already and cannot be refused.
        """

    def end_write(self, size_bytes: int) -> None:
        """The write of an object that was allocated has ended, well or not."""

    def free(self, rows: tuple[int, ...], size_bytes: int) -> None:
        """Take an object's places back."""

    def shrink(self, foreign_bytes: int) -> None:
        """Others have taken so much of it."""

    def check(self) -> None:
        """Raise AssertionError if the books of it disagree."""


class TierPool:
    """Hands out row numbers of a fixed-size pool.

    Mutable state: `_freed` (a stack of rows that came back) and `_fresh` (the first row never
    used), guarded by the owner of the books. Fresh rows are taken last, so that a pool touches no
    more memory than it needs.
    """

    frees_later = False
    is_shared = False
    is_crowded = False

    def __init__(self, *, capacity_rows: int, row_bytes: int) -> None:
        if capacity_rows < 0 or row_bytes < 1:
            raise ValueError("a pool needs rows of at least one byte")
        self.capacity_rows = capacity_rows
        self.row_bytes = row_bytes
        self._freed: list[int] = []
        self._fresh = 0

    def __repr__(self) -> str:
        return f"<TierPool {self.used_rows}/{self.capacity_rows} rows of {self.row_bytes} bytes>"

    @property
    def free_rows(self) -> int:
        """Rows that nobody holds."""
        return self.capacity_rows - self._fresh + len(self._freed)

    @property
    def used_rows(self) -> int:
        """Rows that somebody holds."""
        return self._fresh - len(self._freed)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that somebody holds."""
        return self.used_rows * self.row_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all rows."""
        return self.capacity_rows * self.row_bytes

    def size_bytes(self, block_count: int, members: int = 1) -> int:
        """One row a block and member."""
        return block_count * members * self.row_bytes

    def allocate(
        self, block_count: int, members: int = 1, *, force: bool = False
    ) -> tuple[int, ...] | None:
        """Exactly so many rows, or None and no change. There is nothing beyond the limit."""
        del force
        row_count = block_count * members
        if row_count > self.free_rows:
            return None
        reused = min(row_count, len(self._freed))
        rows = self._freed[len(self._freed) - reused :][::-1]
        del self._freed[len(self._freed) - reused :]
        fresh = row_count - reused
        rows.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        return tuple(rows)

    def end_write(self, size_bytes: int) -> None:
        """Nothing: rows are taken from when they are handed out."""
        del size_bytes

    def free(self, rows: tuple[int, ...], size_bytes: int) -> None:
        """Take rows back."""
        del size_bytes
        self._freed.extend(reversed(rows))

    def shrink(self, foreign_bytes: int) -> None:
        """Nothing: a pool in memory is nobody else's."""
        del foreign_bytes

    def check(self) -> None:
        """Raise AssertionError if a row is free twice or was never handed out."""
        assert len(set(self._freed)) == len(self._freed), "a row is free twice"
        assert all(0 <= row < self._fresh for row in self._freed), "a row nobody had came back"
        assert self._fresh <= self.capacity_rows


class FileSpace:
    """Counts the bytes of files, one per object; a row's place is its position in the file.

    Mutable state: `_used_bytes` and `capacity_bytes` (which shrinks by what others put into the
    directory), guarded by the owner of the books.
    """

    frees_later = True
    is_shared = False
    is_crowded = False

    def __init__(self, *, capacity_bytes: int, file_bytes: Callable[[int, int], int]) -> None:
        self.capacity_bytes = capacity_bytes
        self._file_bytes = file_bytes
        self._used_bytes = 0

    def __repr__(self) -> str:
        return f"<FileSpace {self._used_bytes}/{self.capacity_bytes} bytes>"

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written or deleted included."""
        return self._used_bytes

    def size_bytes(self, block_count: int, members: int = 1) -> int:
        """The file of an object of so many blocks."""
        return self._file_bytes(block_count, members)

    def allocate(
        self, block_count: int, members: int = 1, *, force: bool = False
    ) -> tuple[int, ...] | None:
        """The positions of the rows, or None and no change."""
        size_bytes = self._file_bytes(block_count, members)
        if not force and self._used_bytes + size_bytes > self.capacity_bytes:
            return None
        self._used_bytes += size_bytes
        return tuple(range(block_count * members))

    def end_write(self, size_bytes: int) -> None:
        """Nothing: a file is charged from when it is planned."""
        del size_bytes

    def free(self, rows: tuple[int, ...], size_bytes: int) -> None:
        """A file is gone."""
        del rows
        self._used_bytes -= size_bytes

    def shrink(self, foreign_bytes: int) -> None:
        """Leave room for what others have in the directory."""
        self.capacity_bytes = max(0, self.capacity_bytes - foreign_bytes)

    def check(self) -> None:
        """Raise AssertionError if more was given back than taken."""
        assert self._used_bytes >= 0, "more was freed than allocated"
