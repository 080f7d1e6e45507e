"""A KVBM that is obviously right: sets of blocks, nothing incremental. The oracle of the real."""

from collections.abc import Iterable

import msgspec

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import InstanceDescription, SystemEvent, TierDigest
from opal_connector.events.digests import BucketDigests

Key = tuple[int, str]


class NaiveReplaced(msgspec.Struct, frozen=True):
    added_blocks: int
    removed_blocks: int


def blocks_of(fact: ObjectFact, shared_blocks: int | None = None) -> list[tuple[bytes, bytes]]:
    """(parent, block) of the blocks that a fact is about."""
    shared = fact.shared_blocks if shared_blocks is None else shared_blocks
    run = fact.block_hashes
    hashes = [run[place : place + 32] for place in range(0, len(run), 32)]
    return list(zip([fact.parent_hash, *hashes], hashes, strict=False))[shared:]


def digest_of(key: Key, blocks: Iterable[bytes], *, is_complete: bool = True) -> TierDigest:
    kept = list(blocks)
    digests = BucketDigests()
    digests.flip_all(kept)
    return TierDigest(key[0], key[1], len(kept), digests.buckets(), is_complete)


class NaiveWorker:
    def __init__(self, description: InstanceDescription) -> None:
        self.description = description
        self.system: SystemEvent | None = None
        self.is_live = True
        self.tiers: dict[Key, dict[bytes, bytes]] = {}


class NaiveKVBM:
    """Per worker, group and tier the set of its blocks, with their parents."""

    def __init__(self) -> None:
        self.workers: dict[str, NaiveWorker] = {}

    def join(self, description: InstanceDescription) -> None:
        known = self.workers.get(description.instance_id)
        if known is None:
            self.workers[description.instance_id] = NaiveWorker(description)
            return
        if known.description.incarnation != description.incarnation:
            kept = {tier.name for tier in description.tiers if tier.is_persistent}
            known.tiers = {key: held for key, held in known.tiers.items() if key[1] in kept}
            known.is_live = True
        known.description = description

    def remove_worker(self, worker_id: str) -> None:
        self.workers.pop(worker_id, None)

    def set_live(self, worker_id: str, *, is_live: bool) -> None:
        self.workers[worker_id].is_live = is_live

    def process_system_events(self, worker_id: str, events: Iterable[SystemEvent]) -> None:
        for event in events:
            self.workers[worker_id].system = event

    def process_kvc_events(self, worker_id: str, events: Iterable[KVCEvent]) -> None:
        for event in events:
            match event:
                case Insert(fact, tier):
                    self._add(worker_id, (fact.group, tier), blocks_of(fact))
                case Delete(fact, tier):
                    self._drop(worker_id, (fact.group, tier), blocks_of(fact))
                case Copy(fact, _, target):
                    self._add(worker_id, (fact.group, target), blocks_of(fact))
                case Move(fact, source, target, shared):
                    self._add(worker_id, (fact.group, target), blocks_of(fact))
                    self._drop(worker_id, (fact.group, source), blocks_of(fact, shared))

    def clear_tier(self, worker_id: str, tier: str, group: int | None = None) -> int:
        tiers = self.workers[worker_id].tiers
        keys = [key for key in tiers if key[1] == tier and group in (None, key[0])]
        return sum(len(tiers.pop(key)) for key in keys)

    def digests(self, worker_id: str) -> tuple[TierDigest, ...]:
        held = self.workers[worker_id].tiers
        return tuple(digest_of(key, blocks) for key, blocks in held.items() if blocks)

    def replace(
        self,
        worker_id: str,
        group: int,
        tier: str,
        facts: Iterable[ObjectFact],
        buckets: bytes = b"",
        *,
        keep_others: bool = False,
    ) -> NaiveReplaced:
        held = self.workers[worker_id].tiers.setdefault((group, tier), {})
        new = {block: parent for fact in facts for parent, block in blocks_of(fact)}
        old = {block for block in held if not buckets or block[0] in buckets}
        gone = set() if keep_others else old - new.keys()
        added = len(new.keys() - held.keys())
        for block in gone:
            del held[block]
        held.update(new)
        return NaiveReplaced(added, len(gone))

    def blocks(self, worker_id: str) -> dict[Key, set[bytes]]:
        """What a worker holds, tiers that hold nothing left out."""
        if worker_id not in self.workers:
            return {}
        return {key: set(held) for key, held in self.workers[worker_id].tiers.items() if held}

    def _add(self, worker_id: str, key: Key, blocks: list[tuple[bytes, bytes]]) -> None:
        held = self.workers[worker_id].tiers.setdefault(key, {})
        held.update({block: parent for parent, block in blocks})

    def _drop(self, worker_id: str, key: Key, blocks: list[tuple[bytes, bytes]]) -> None:
        held = self.workers[worker_id].tiers.setdefault(key, {})
        for _, block in blocks:
            held.pop(block, None)
