"""The room of a directory that instances share: each writes what it was granted."""

from collections.abc import Callable

_GRANT_BYTES_MOST = 64 << 20
_GRANT_OBJECTS = 64  # asked for at once, so that few objects wait for a grant
# An eviction makes room for a few grants of a 64th of the capacity; the tier is full all the same.
_CROWDED_GRANTS = 4


class SharedSpace:
    """Counts this instance's knowledge and its leave to write.

    `used_bytes` is what this instance knows to be there, which others may have removed already.

    Mutable state: `_known_bytes`, `unused_bytes` (granted and not planned), `_in_flight_bytes`
    (being written), `_wanted_bytes` and `_crowded_grants`; guarded by the owner of the books.
    """

    frees_later = True
    is_shared = True

    def __init__(self, *, capacity_bytes: int, file_bytes: Callable[[int, int], int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.unused_bytes = 0
        self._file_bytes = file_bytes
        self._known_bytes = 0
        self._in_flight_bytes = 0
        self._wanted_bytes = min(capacity_bytes // 64, _GRANT_BYTES_MOST)
        self._crowded_grants = 0

    def __repr__(self) -> str:
        return f"<SharedSpace {self._known_bytes}/{self.capacity_bytes} bytes known>"

    @property
    def used_bytes(self) -> int:
        """Bytes of the files that this instance knows."""
        return self._known_bytes

    @property
    def promised_bytes(self) -> int:
        """What this instance may still add: a scan of the directory does not see it yet."""
        return self.unused_bytes + self._in_flight_bytes

    @property
    def is_crowded(self) -> bool:
        """Whether one of the last grants was refused, or came out of evictions."""
        return self._crowded_grants > 0

    @property
    def wanted_bytes(self) -> int:
        """What to ask for; 0 while what was granted is enough."""
        return self._wanted_bytes

    def grant(self, granted_bytes: int, *, was_crowded: bool) -> None:
        """More may be written, or nothing if the directory is full of what is in use."""
        self.unused_bytes += granted_bytes
        self._wanted_bytes = 0
        left = max(0, self._crowded_grants - 1)
        self._crowded_grants = _CROWDED_GRANTS if was_crowded else left

    def size_bytes(self, block_count: int, members: int = 1) -> int:
        """The file of an object of so many blocks."""
        return self._file_bytes(block_count, members)

    def allocate(
        self, block_count: int, members: int = 1, *, force: bool = False
    ) -> tuple[int, ...] | None:
        """Positions in a new file, if it was granted; with `force` in one that is there."""
        size_bytes = self._file_bytes(block_count, members)
        if not force:
            if size_bytes > self.unused_bytes:
                share = max(1, self.capacity_bytes // 64)
                batch = max(size_bytes, min(share, _GRANT_OBJECTS * size_bytes, _GRANT_BYTES_MOST))
                self._wanted_bytes = max(self._wanted_bytes, batch)
                return None
            self.unused_bytes -= size_bytes
            self._in_flight_bytes += size_bytes
        self._known_bytes += size_bytes
        return tuple(range(block_count * members))

    def end_write(self, size_bytes: int) -> None:
        """A file is there, or will not be."""
        self._in_flight_bytes -= size_bytes

    def free(self, rows: tuple[int, ...], size_bytes: int) -> None:
        """A file is gone. Its bytes are anybody's now."""
        del rows
        self._known_bytes -= size_bytes

    def shrink(self, foreign_bytes: int) -> None:
        """Nothing: what others have is part of the limit."""
        del foreign_bytes

    def check(self) -> None:
        """Raise AssertionError if more was given back than taken."""
        assert self._known_bytes >= 0, "more was freed than allocated"
        assert self.unused_bytes >= 0, "more was written than granted"
        assert self._in_flight_bytes >= 0, "more writes have ended than begun"
