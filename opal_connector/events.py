"""Facts about what is where, in the order in which they became true.

A closed union of frozen tagged Structs with exactly the fields that their kind needs. The books
append to an `EventLog` in commit and nowhere else; replaying a log gives the contents of every
tier.
"""

from enum import IntEnum

import msgspec


class KVCEventType(IntEnum):
    """Opal's numbers for the four kinds."""

    INSERT = 1
    DELETE = 2
    MOVE = 3
    COPY = 4


class ObjectFact(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The object that an event is about.

    `block_hashes` is the concatenation of the hashes of the object's blocks; the last one names
    the object. The first `shared_blocks` of them are also held by another object of the same tier
    (siblings that part inside a chunk), so only the others begin or cease to be retrievable.
    """

    group: int
    parent_hash: bytes
    block_hashes: bytes
    shared_blocks: int = 0

    @property
    def chunk_hash(self) -> bytes:
        """The digest that names the object."""
        return self.block_hashes[-32:]


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True):
    fact: ObjectFact


class Insert(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.INSERT)):
    """A new copy in `tier`, from the device.

    `token_ids` are the tokens of the object's blocks, for consumers that hash them themselves.
    """

    tier: str
    token_ids: tuple[int, ...] = ()
    lora_name: str | None = None


class Delete(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.DELETE)):
    """The copy in `tier` is gone."""

    tier: str


class Move(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.MOVE)):
    """The copy in `source_tier` became one in `target_tier`.

    `fact.shared_blocks` is about the target; in the source others still hold the first
    `source_shared_blocks`.
    """

    source_tier: str
    target_tier: str
    source_shared_blocks: int = 0
    token_ids: tuple[int, ...] = ()
    lora_name: str | None = None


class Copy(_Event, frozen=True, gc=False, array_like=True, tag=int(KVCEventType.COPY)):
    """A second copy in `target_tier`; the one in `source_tier` stays."""

    source_tier: str
    target_tier: str
    token_ids: tuple[int, ...] = ()
    lora_name: str | None = None


KVCEvent = Insert | Delete | Move | Copy


class EventLog:
    """Events since the last `take`, in order.

    Mutable state: the list of pending events. Whoever guards the books guards it. A disabled log
    drops what it is given, so that nothing grows where nobody listens.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._pending: list[KVCEvent] = []

    def __len__(self) -> int:
        return len(self._pending)

    def append(self, event: KVCEvent) -> None:
        """Add a fact."""
        if self.enabled:
            self._pending.append(event)

    def take(self) -> list[KVCEvent]:
        """All pending events; they are the caller's now."""
        taken, self._pending = self._pending, []
        return taken
