"""The numbered batches of one incarnation, with a fingerprint of what they add up to."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    Batch,
    Digests,
    TierDigest,
    encode_message,
)
from opal_connector.events.digests import HASH_BYTES, BucketDigests

BATCH_EVENTS: Final = 4_096
BATCH_BYTES: Final = 256 << 10  # a subscriber that does not read may hold back many of these
_EVENT_OVERHEAD_BYTES: Final = 96


class Holding:
    """What the events of one (group, tier) add up to.

    Mutable state: the count, the fingerprint and, while `present` is not None, the blocks
    themselves; used by one thread. Events that went before are not known then, so that an event
    may say what is known already; `settle` ends that.
    """

    def __init__(self) -> None:
        self.block_count = 0
        self.digests = BucketDigests()
        self.present: set[bytes] | None = None

    def add(self, run: bytes) -> None:
        """These blocks begin to be present."""
        if self.present is not None:
            self.present.update(_blocks(run))
            return
        self.block_count += len(run) // HASH_BYTES
        self.digests.flip(run)

    def take(self, run: bytes) -> None:
        """These blocks cease to be present."""
        if self.present is not None:
            self.present.difference_update(_blocks(run))
            return
        self.block_count -= len(run) // HASH_BYTES
        self.digests.flip(run)

    def settle(self) -> None:
        """From here on every event changes what it says."""
        if self.present is not None:
            self.block_count = len(self.present)
            self.digests.clear()
            self.digests.flip_all(list(self.present))
            self.present = None


class EventStream:
    """Events become batches, and stay for a while for whoever has missed them.

    Mutable state: the events that are in no batch yet, the sequence, the ring of encoded batches
    (bounded by bytes) and the holdings; used by the publisher's thread.
    """

    def __init__(
        self,
        *,
        instance_id: str,
        model: str,
        block_tokens: int,
        replay_bytes: int,
        incarnation: int,
    ) -> None:
        self.instance_id = instance_id
        self.incarnation = incarnation
        self.sequence = -1
        self.holdings: dict[tuple[int, str], Holding] = {}
        self._model = model
        self._block_tokens = block_tokens
        self._replay_bytes = replay_bytes
        self._pending: list[KVCEvent] = []
        self._pending_bytes = 0
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether a batch is due, however young its events are."""
        return len(self._pending) >= BATCH_EVENTS or self._pending_bytes >= BATCH_BYTES

    @property
    def ring_bytes(self) -> int:
        """What the kept batches take."""
        return self._ring_bytes

    def restart(self, incarnation: int) -> None:
        """Begin anew: nothing that was said before counts."""
        self.incarnation = incarnation
        self.sequence = -1
        self.holdings.clear()
        self._pending.clear()
        self._pending_bytes = 0
        self._ring.clear()
        self._ring_bytes = 0

    def holding(self, group: int, tier: str) -> Holding:
        """What the events of a (group, tier) add up to."""
        holding = self.holdings.get((group, tier))
        if holding is None:
            holding = self.holdings[group, tier] = Holding()
        return holding

    def hear(self, event: KVCEvent) -> None:
        """Take the next event. Tokens are left out: the hashes name everything."""
        fact = event.fact
        own = fact.block_hashes[fact.shared_blocks * HASH_BYTES :]
        match event:
            case Insert(_, tier, token_ids, lora_name):
                self.holding(fact.group, tier).add(own)
                if token_ids:
                    event = Insert(fact, tier, (), lora_name)
            case Delete(_, tier):
                self.holding(fact.group, tier).take(own)
            case Copy(_, source, tier, token_ids, lora_name):
                self.holding(fact.group, tier).add(own)
                if token_ids:
                    event = Copy(fact, source, tier, (), lora_name)
            case Move(_, source, tier, shared_blocks, token_ids, lora_name):
                self.holding(fact.group, tier).add(own)
                left = fact.block_hashes[shared_blocks * HASH_BYTES :]
                self.holding(fact.group, source).take(left)
                if token_ids:
                    event = Move(fact, source, tier, shared_blocks, (), lora_name)
        self._pending.append(event)
        self._pending_bytes += len(fact.block_hashes) + _EVENT_OVERHEAD_BYTES

    def flush(self, clock: Callable[[], float] = time.time) -> bytes | None:
        """The next batch, encoded; None if nothing is pending."""
        if not self._pending:
            return None
        self.sequence += 1
        batch = Batch(
            FORMAT_VERSION,
            self.instance_id,
            self._model,
            self.incarnation,
            self.sequence,
            clock(),
            self._block_tokens,
            tuple(self._pending),
        )
        payload = encode_message(batch)
        self._pending.clear()
        self._pending_bytes = 0
        self._ring.append(payload)
        self._ring_bytes += len(payload)
        while self._ring_bytes > self._replay_bytes:
            self._ring_bytes -= len(self._ring.popleft())
        return payload

    def since(self, first_sequence: int) -> list[bytes]:
        """The kept batches from `first_sequence` on; none if that one is not kept."""
        oldest = self.sequence - len(self._ring) + 1
        if not oldest <= first_sequence <= self.sequence:
            return []
        return list(self._ring)[first_sequence - oldest :]

    def refill(self, group: int, tier: str, facts: Iterable[ObjectFact]) -> None:
        """Begin a holding anew with what is listed now; some events to come may be in it."""
        holding = self.holdings[group, tier] = Holding()
        holding.present = set()
        for fact in facts:
            holding.add(fact.block_hashes)

    def settle(self) -> None:
        """All events that the listings could know have been heard."""
        for holding in self.holdings.values():
            holding.settle()

    def digests(self, is_complete: Callable[[str], bool]) -> Digests:
        """The fingerprints of all holdings."""
        return tuple(
            TierDigest(
                group, tier, holding.block_count, holding.digests.buckets(), is_complete(tier)
            )
            for (group, tier), holding in self.holdings.items()
        )


def _blocks(run: bytes) -> Iterable[bytes]:
    return (run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES))
