"""What the KVBM knows of one worker."""

import msgspec

from opal_connector.cluster.index import PrefixIndex
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import InstanceDescription, SystemEvent, TierDescription
from opal_connector.events.digests import BucketDigests

_DEVICE = TierDescription(DEVICE_TIER)


class Place(msgspec.Struct, eq=False):
    """One tier of one worker, for one kv group: where in the index, how much, which blocks.

    `refused_blocks` found no room in the index: while there are any, what is known is less than
    what is there.
    """

    index: PrefixIndex
    column: int
    bit: int
    digest: BucketDigests
    block_count: int = 0
    refused_blocks: int = 0


class OpalWorkerState(msgspec.Struct, eq=False):
    """A worker: its description, its load, whether it is scored, what it holds by (group, tier).

    `unknown_deletes` and `repeated_inserts` count blocks of facts that changed nothing.
    """

    description: InstanceDescription
    system: SystemEvent | None = None
    is_live: bool = True
    event_count: int = 0
    repeated_inserts: int = 0
    unknown_deletes: int = 0
    malformed_events: int = 0
    places: dict[tuple[int, str], Place] = {}

    @property
    def block_counts(self) -> dict[tuple[int, str], int]:
        """Blocks by (group, tier), where there are any."""
        return {key: place.block_count for key, place in self.places.items() if place.block_count}

    @property
    def refused_blocks(self) -> int:
        """Blocks that found no room in the index."""
        return sum(place.refused_blocks for place in self.places.values())

    def tier(self, name: str) -> TierDescription:
        """A tier's description; one that was not described is the worker's own, and volatile."""
        for tier in self.description.tiers:
            if tier.name == name:
                return tier
        return _DEVICE if name == DEVICE_TIER else TierDescription(name)
