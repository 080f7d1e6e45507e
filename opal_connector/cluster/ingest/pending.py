"""Batches that are ahead of what was applied, until those before them are here."""

from typing import Generic, TypeVar

_Batch = TypeVar("_Batch")


class PendingBatches(Generic[_Batch]):
    """Batches by sequence number, bounded by number and bytes.

    Mutable state: the batches and the sum of their sizes. Its source guards it.
    """

    def __init__(self, *, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._batches: dict[int, tuple[_Batch, int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._batches

    @property
    def is_full(self) -> bool:
        """Whether another one would be above the limits."""
        return len(self._batches) >= self._max_batches or self._bytes >= self._max_bytes

    def add(self, sequence: int, batch: _Batch, size: int) -> None:
        """Keep a batch; the first one of a sequence number stays."""
        if sequence not in self._batches:
            self._batches[sequence] = (batch, size)
            self._bytes += size

    def pop(self, sequence: int) -> _Batch | None:
        """Take the batch with this number, if it is here."""
        found = self._batches.pop(sequence, None)
        if found is None:
            return None
        self._bytes -= found[1]
        return found[0]

    def lowest(self) -> int | None:
        """The smallest sequence number, None where there is none."""
        return min(self._batches, default=None)

    def drop_through(self, sequence: int) -> int:
        """Forget all batches up to this number; how many there were."""
        old = [number for number in self._batches if number <= sequence]
        for number in old:
            self.pop(number)
        return len(old)

    def clear(self) -> None:
        """Forget all batches."""
        self._batches.clear()
        self._bytes = 0
