"""Which workers the bits of a mask stand for."""

_REMEMBERED_MASKS = 65_536


class WorkerNames:
    """The workers that bits stand for.

    Mutable state: the bits, and in `known` the workers of masks that were asked for, bounded; used
    by one thread.
    """

    def __init__(self) -> None:
        self.bits: dict[str, int] = {}
        self.known: dict[int, tuple[str, ...]] = {}

    def add(self, worker_id: str) -> None:
        """Give a worker the lowest free bit; one that has a bit keeps it."""
        if worker_id in self.bits:
            return
        taken = set(self.bits.values())
        bit = 1
        while bit in taken:
            bit <<= 1
        self.bits[worker_id] = bit
        self.known.clear()

    def discard(self, worker_id: str) -> None:
        """Take a worker's bit back."""
        del self.bits[worker_id]
        self.known.clear()

    def of(self, mask: int) -> tuple[str, ...]:
        """The workers of a mask."""
        found = self.known.get(mask)
        if found is None:
            found = tuple(worker_id for worker_id, bit in self.bits.items() if bit & mask)
            if len(self.known) >= _REMEMBERED_MASKS:
                self.known.clear()
            self.known[mask] = found
        return found
