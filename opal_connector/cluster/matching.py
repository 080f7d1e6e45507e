"""How far each worker could serve a sequence, read off the index."""

from collections.abc import Sequence

from opal_connector.cluster.index import PrefixIndex
from opal_connector.cluster.places import ModelPlaces
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.segments import Segment

Walk = list[tuple[int, Segment]]  # where each segment of a sequence ends, in blocks


def matched_blocks(
    places: ModelPlaces, index: PrefixIndex, hashes: Sequence[bytes], workers: int
) -> dict[str, int]:
    """Per worker the blocks from the start that it could serve; workers above 0 only."""
    depths: dict[str, int] = {}
    names = places.names
    reached, alive = 0, workers
    for stop, segment in index.walk(hashes, workers):
        left = alive & segment.reach
        if left != alive:
            if reached:
                for name in names(alive ^ left):
                    depths[name] = reached
            alive = left
        reached = stop
    if reached:
        for name in names(alive):
            depths[name] = reached
    return depths


def worker_matches(
    places: ModelPlaces, index: PrefixIndex, hashes: Sequence[bytes], workers: int
) -> dict[str, WorkerMatch]:
    """The same in tokens, with what is on the device and from which tier the rest would come."""
    walk: Walk = list(index.walk(hashes, workers))
    matches: dict[str, WorkerMatch] = {}
    for worker_id, blocks in matched_blocks(places, index, hashes, workers).items():
        bit = places.bit(worker_id)
        device_blocks = 0
        for stop, segment in walk:
            if not segment.device_reach & bit:
                break
            device_blocks = stop
        tier_blocks = _tier_blocks(places, index, walk, worker_id, (device_blocks, blocks))
        tokens = places.block_tokens
        matches[worker_id] = WorkerMatch(
            blocks * tokens,
            device_blocks * tokens,
            {tier: count * tokens for tier, count in tier_blocks.items()},
        )
    return matches


def _tier_blocks(
    places: ModelPlaces,
    index: PrefixIndex,
    walk: Walk,
    worker_id: str,
    extension: tuple[int, int],
) -> dict[str, int]:
    """From which tier a worker would load the blocks of a range, the fastest that has them."""
    counts: dict[str, int] = {}
    first, end = extension
    bit = places.bit(worker_id)
    tiers = places.tier_columns(worker_id) if first < end else []
    start = 0
    for stop, segment in walk:
        count = min(stop, end) - max(start, first)
        start = stop
        if count <= 0:
            continue
        for name, column, is_shared in tiers:
            holders = segment.held[column] if column < len(segment.held) else 0
            if (index.served_by(column, holders) if is_shared else holders) & bit:
                counts[name] = counts.get(name, 0) + count
                break
    return counts


def merged(some: dict[str, WorkerMatch], others: dict[str, WorkerMatch]) -> dict[str, WorkerMatch]:
    """What a worker can serve of two kv groups that both must have it all: the shorter match."""
    return {
        worker_id: min(match, others[worker_id], key=lambda each: each.total_tokens)
        for worker_id, match in some.items()
        if worker_id in others
    }
