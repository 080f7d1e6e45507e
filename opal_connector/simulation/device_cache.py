"""The device's own prefix cache, as vLLM has it."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from opal_connector.events import DEVICE_TIER, Delete, Insert, KVCEvent, ObjectFact
from opal_connector.keys import CHAIN_ROOT


class DeviceCache:
    """Blocks in order of use, the tail of a prompt older than its head.

    Mutable state: the blocks, and if `tells` the facts about them since the last `take`.
    """

    def __init__(self, capacity_blocks: int, *, tells: bool = False) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._tells = tells
        self._facts: list[KVCEvent] = []

    @property
    def blocks(self) -> Iterable[bytes]:
        """What is there."""
        return self._blocks

    def match(self, hashes: list[bytes], usable: int) -> int:
        """How many blocks from the first on are there."""
        for count in range(usable):
            if hashes[count] not in self._blocks:
                return count
        return usable

    def put(self, hashes: list[bytes]) -> None:
        """A request over these blocks has run; it had all of them on the device."""
        if not self._capacity:
            return
        if self._tells:
            self._facts += self._arrivals(hashes)
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        excess = len(self._blocks) - self._capacity
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(excess)]
        if self._tells:
            self._facts += (Delete(ObjectFact(0, b"", block), DEVICE_TIER) for block in evicted)

    def take(self) -> list[KVCEvent]:
        """What has come and gone since the last call, in order."""
        taken, self._facts = self._facts, []
        return taken

    def _arrivals(self, hashes: Sequence[bytes]) -> Iterator[KVCEvent]:
        """One fact per run of blocks that are not there."""
        start = 0
        while start < len(hashes):
            stop = start
            while stop < len(hashes) and hashes[stop] not in self._blocks:
                stop += 1
            if stop > start:
                parent_hash = hashes[start - 1] if start else CHAIN_ROOT
                run = b"".join(hashes[start:stop])
                yield Insert(ObjectFact(0, parent_hash, run), DEVICE_TIER)
            start = stop + 1
