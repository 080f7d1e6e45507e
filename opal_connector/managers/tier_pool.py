"""The rows of one tier: which are free, and how many bytes that makes."""


class TierPool:
    """Hands out row numbers of a fixed-size pool.

    Mutable state: `_freed` (a stack of rows that came back) and `_fresh` (the first row never
    used), guarded by the owner of the books. Fresh rows are taken last, so that a pool touches no
    more memory than it needs.
    """

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

    def allocate(self, count: int) -> tuple[int, ...] | None:
        """Exactly `count` rows, or None and no change."""
        if count > self.free_rows:
            return None
        reused = min(count, len(self._freed))
        rows = self._freed[len(self._freed) - reused :][::-1]
        del self._freed[len(self._freed) - reused :]
        fresh = count - reused
        rows.extend(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        return tuple(rows)

    def free(self, rows: tuple[int, ...]) -> None:
        """Take rows back."""
        self._freed.extend(reversed(rows))

    def check(self) -> None:
        """Raise AssertionError if a row is free twice or was never handed out."""
        assert len(set(self._freed)) == len(self._freed), "a row is free twice"
        assert all(0 <= row < self._fresh for row in self._freed), "a row nobody had came back"
        assert self._fresh <= self.capacity_rows
