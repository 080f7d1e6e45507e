"""The device's own prefix cache, as vLLM has it."""

from collections import OrderedDict


class DeviceCache:
    """Blocks in order of use, the tail of a prompt older than its head.

    Mutable state: the blocks.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

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
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
