"""Answers that come in several parts."""

from opal_connector.events.channel import Contents, Replay
from opal_connector.events.facts import ObjectFact

_FACT_BYTES = 200  # a fact's own memory besides its hashes, roughly
_PART_BYTES = 100  # that a part was here, however empty it is


class _Parts:
    """Which parts of an answer are here, bounded by bytes.

    An instance that does not number its parts calls all of them 0; then the last one decides.
    Mutable state: the numbers seen and how long it is so far; guarded by its source.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._seen: set[int] = set()
        self._last: int | None = None

    def grow(self, size: int) -> None:
        """Count a part. Every one is a sign of life, so nothing else ends an endless answer.

        Raises:
            MemoryError: The answer is longer than may be kept.
        """
        self._bytes += _PART_BYTES + size
        if self._bytes > self._max_bytes:
            raise MemoryError(f"an answer of more than {self._max_bytes} bytes")

    def is_new(self, part: int, *, is_last: bool) -> bool:
        """Note a part; whether it was not here yet."""
        is_new = part == 0 or part not in self._seen
        self._seen.add(part)
        if is_last:
            self._last = part
        return is_new

    @property
    def are_all_here(self) -> bool:
        """Whether the answer is whole."""
        return self._last is not None and (self._last == 0 or len(self._seen) == self._last + 1)


class ReplayParts:
    """The parts of one replay, whose batches are taken as they come."""

    def __init__(self, max_bytes: int) -> None:
        self._parts = _Parts(max_bytes)

    def add(self, reply: Replay) -> bool:
        """Note a part; whether the answer is whole now.

        Raises:
            MemoryError: The answer is longer than any replay is.
        """
        self._parts.grow(sum(map(len, reply.batches)))
        self._parts.is_new(reply.part, is_last=reply.is_last)
        return self._parts.are_all_here


class ContentsParts:
    """The parts of what one tier holds, bounded by bytes.

    Mutable state: the facts so far and their label; guarded by its source.
    """

    def __init__(self, max_bytes: int) -> None:
        self._parts = _Parts(max_bytes)
        self.facts: list[ObjectFact] = []
        self.sequence: int | None = None
        self.is_complete = True

    def add(self, reply: Contents) -> bool:
        """Take a part; whether the answer is whole now.

        Raises:
            MemoryError: The answer is longer than may be kept.
        """
        self._parts.grow(sum(_FACT_BYTES + len(fact.block_hashes) for fact in reply.facts))
        if self._parts.is_new(reply.part, is_last=reply.is_last):
            self.facts.extend(reply.facts)
            # All parts are true at their label or later, so the whole is at the smallest one.
            if self.sequence is None or reply.sequence < self.sequence:
                self.sequence = reply.sequence
            self.is_complete = self.is_complete and reply.is_complete
        return self._parts.are_all_here
