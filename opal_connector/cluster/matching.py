"""How far each worker could serve a sequence, read off the index."""

from collections.abc import Iterator, Sequence

from opal_connector.cluster.index import PrefixIndex
from opal_connector.cluster.places import ModelPlaces
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.segments import Segment


def worker_matches(
    places: ModelPlaces, index: PrefixIndex, hashes: Sequence[bytes], workers: int
) -> dict[str, WorkerMatch]:
    """The same in tokens, with what is on the device and from which tier the rest would come."""
    reached = index.depths(hashes, workers, places.names)
    on_device = dict.fromkeys(reached, 0)
    by_tier: dict[tuple[str, int], int] = {}  # tier and workers to blocks
    alive, start = workers, 0
    for stop, segment in index.walk(hashes, workers):
        left = alive & segment.device_reach
        if left != alive:
            on_device.update(dict.fromkeys(places.names.of(alive ^ left), start))
            alive = left
        extending = segment.reach & workers & ~segment.device_reach
        if extending:
            for tier, served in tier_sources(places, index, segment, extending):
                by_tier[tier, served] = by_tier.get((tier, served), 0) + stop - start
        start = stop
    on_device.update(dict.fromkeys(places.names.of(alive), start))
    tokens = places.block_tokens
    tier_tokens: dict[str, dict[str, int]] = {worker_id: {} for worker_id in reached}
    for (tier, served), blocks in by_tier.items():
        for worker_id in places.names.of(served):
            mine = tier_tokens[worker_id]
            mine[tier] = mine.get(tier, 0) + blocks * tokens
    return {
        worker_id: WorkerMatch(
            blocks * tokens, on_device[worker_id] * tokens, tier_tokens[worker_id]
        )
        for worker_id, blocks in reached.items()
    }


def tier_sources(
    places: ModelPlaces, index: PrefixIndex, segment: Segment, workers: int
) -> Iterator[tuple[str, int]]:
    """From which tier these workers would load a segment: the fastest that has it, of each."""
    held = segment.held
    for columns, mask in places.tier_orders():
        asking = workers & mask
        for name, column, is_shared in columns:
            if not asking:
                break
            holders = held[column] if column < len(held) else 0
            served = asking & (index.served_by(column, holders) if is_shared else holders)
            if served:
                yield name, served
                asking ^= served
