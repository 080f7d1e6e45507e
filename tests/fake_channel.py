"""What a fake engine's event channel asks it: who it is, what it holds, how busy it is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from opal_connector.events import Insert, KVCEvent, ObjectFact
from opal_connector.events.channel import (
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
)
from opal_connector.keys import LoraIdentity

if TYPE_CHECKING:
    from fake_engine import FakeEngine

BLOCK_TOKENS = 16
BLOCK_BYTES = 1_000_000
HOST = "CPUMemory"
DISK = "LocalNVMe"

Block = tuple[bytes, bytes]


def adapter_of(name: str) -> LoraIdentity:
    return LoraIdentity(name, f"/adapters/{name}", f"weights of {name}")


class Device:
    """What the publisher's thread was told of the device's blocks; it alone uses this."""

    def __init__(self) -> None:
        self._held: dict[bytes, bytes] = {}
        self.is_complete = True
        self.groups = (0,)

    def translate(self, raw: KVCEvent) -> list[KVCEvent]:
        fact = raw.fact
        run = fact.block_hashes
        parent = fact.parent_hash
        for start in range(0, len(run), 32):
            block = run[start : start + 32]
            if isinstance(raw, Insert):
                self._held[block] = parent
            else:
                self._held.pop(block, None)
            parent = block
        return [raw]

    def held(self, group: int) -> list[Block]:
        return [(parent, block) for block, parent in self._held.items()]

    def forget(self) -> None:
        self._held.clear()


class Source:
    """The instance as its publisher sees it."""

    is_ready = True
    places = ((0, HOST), (0, DISK))

    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine
        self.model = engine.model
        self.block_tokens = BLOCK_TOKENS

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        return InstanceDescription(
            instance_id=instance_id,
            incarnation=incarnation,
            model=self.model,
            block_tokens=BLOCK_TOKENS,
            tiers=(TierDescription(HOST), TierDescription(DISK, is_persistent=True)),
            adapters=tuple(map(adapter_of, self._engine.adapters)),
        )

    def system(self) -> SystemEvent:
        return SystemEvent(
            queue_depth=self._engine.running,
            running=self._engine.running,
            prefill_tokens_per_second=self._engine.prefill_tokens_per_second,
            chunk_bytes=BLOCK_BYTES,
            tiers=(TierLoad(HOST, 0, 1 << 40, self._engine.load_seconds_per_byte),),
        )

    def is_complete(self, tier: str) -> bool:
        return True

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        held = {HOST: self._engine.on_host, DISK: self._engine.on_disk}
        return iter(list(held[tier]))

    def pass_lock(self) -> None:
        """One thread changes it, and says so at once."""
