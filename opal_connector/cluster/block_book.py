"""Facts about blocks, written into the indexes of all models, within one limit."""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final

import msgspec

from opal_connector.cluster.group_layout import block_tokens_of
from opal_connector.cluster.index import PrefixIndex
from opal_connector.cluster.places import ModelPlaces
from opal_connector.cluster.request import Replaced
from opal_connector.cluster.worker_state import OpalWorkerState, Place
from opal_connector.events import ObjectFact
from opal_connector.events.channel import InstanceDescription
from opal_connector.events.digests import BucketDigests
from opal_connector.keys import HASH_BYTES

# What CPython takes for one block (its digest, its place in the dict and in a segment) and for
# one segment; `benchmarks/kvbm.py` compares them with the memory of the process.
BLOCK_BYTES: Final = 160
SEGMENT_BYTES: Final = 560
_MOST_PLACES: Final = 256  # groups times tiers of one worker
_SPLITTERS: Final = tuple(Struct(f"{HASH_BYTES}s" * count) for count in range(513))


class BlockBook:
    """What is held where, for all models, and how much of it there is.

    Mutable state: the places and indexes per model and block size; used by one thread.
    """

    def __init__(self, *, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._models: dict[tuple[str, int], ModelPlaces] = {}

    @property
    def entry_count(self) -> int:
        """Distinct blocks of all models and groups."""
        return sum(index.block_count for index in self.indexes())

    @property
    def used_bytes(self) -> int:
        """Memory for what is held; 0 when nothing is."""
        return sum(
            index.block_count * BLOCK_BYTES + index.tree.segment_count * SEGMENT_BYTES
            for index in self.indexes()
        )

    # ---- models ----

    def places(self, description: InstanceDescription) -> ModelPlaces:
        """The places of a worker's model, new if it is the first."""
        key = (description.model, description.block_tokens)
        places = self._models.get(key)
        if places is None:
            places = self._models[key] = ModelPlaces(*key)
        return places

    def forget(self, places: ModelPlaces) -> None:
        """A model that nobody serves any more."""
        del self._models[places.model, places.block_tokens]

    def asked(self, model: str | None) -> list[ModelPlaces]:
        """The places of a model, or of all; an engine that names none may serve any."""
        if model is None:
            return list(self._models.values())
        return [places for places in self._models.values() if places.model in (model, "")]

    def models(self) -> Sequence[ModelPlaces]:
        """All places."""
        return list(self._models.values())

    def indexes(self) -> Iterator[PrefixIndex]:
        """All indexes."""
        for places in self._models.values():
            yield from places.indexes.values()

    # ---- facts ----

    def insert(self, state: OpalWorkerState, tier: str, fact: ObjectFact) -> None:
        """The fact's own blocks are in a tier now."""
        run, parent_hash = fact.block_hashes, fact.parent_hash
        if fact.shared_blocks:
            cut = fact.shared_blocks * HASH_BYTES
            run, parent_hash = run[cut:], run[cut - HASH_BYTES : cut]
        hashes = split_run(run)
        if not hashes or len(parent_hash) != HASH_BYTES:
            state.malformed_events += bool(run) or len(parent_hash) != HASH_BYTES
            return
        place = self._place(state, fact.group, tier)
        if place is None:
            state.malformed_events += 1
            return
        known = place.index.tree.blocks
        if not self._has_room(len(hashes)) and not self._has_room(len(set(hashes) - known.keys())):
            place.refused_blocks += len(hashes)
            return
        try:
            changed = place.index.insert(place.column, place.bit, parent_hash, hashes)
        except ValueError:
            state.malformed_events += 1
            return
        if len(changed) == len(hashes):
            place.digest.flip(run)
        else:
            state.repeated_inserts += len(hashes) - len(changed)
            place.digest.flip(b"".join(changed))
        place.block_count += len(changed)

    def delete(
        self, state: OpalWorkerState, tier: str, fact: ObjectFact, shared_blocks: int
    ) -> None:
        """The fact's own blocks, those behind `shared_blocks`, are not in a tier any more."""
        run = fact.block_hashes[shared_blocks * HASH_BYTES :]
        place = state.places.get((fact.group, tier))
        count, rest = divmod(len(run), HASH_BYTES)
        is_run = place is not None and count > 0 and rest == 0
        if place is not None and is_run and place.index.delete_tail(place.column, place.bit, run):
            place.digest.flip(run)
            place.block_count -= count
            return
        hashes = split_run(run)
        if not hashes:
            state.malformed_events += bool(run)
            return
        changed = self._remove(place, hashes, run) if place is not None else 0
        state.unknown_deletes += len(hashes) - changed

    def clear(self, state: OpalWorkerState, group: int, tier: str) -> int:
        """Nothing is in a tier any more; says how many blocks left it."""
        place = state.places[group, tier]
        left = place.index.clear(place.column, place.bit) if place.block_count else 0
        place.block_count = place.refused_blocks = 0
        place.digest.clear()
        return left

    # ---- comparison ----

    def contents(
        self, state: OpalWorkerState, group: int, tier: str, buckets: bytes
    ) -> Iterator[tuple[bytes, bytes]]:
        """The blocks of a tier, of some buckets or all: the parent's hash and the block's."""
        place = state.places.get((group, tier))
        if place is None:
            return
        wanted = frozenset(buckets)
        for parent_hash, run in place.index.held_by(place.column, place.bit):
            above = parent_hash
            for block_hash in run:
                if not wanted or block_hash[0] in wanted:
                    yield above, block_hash
                above = block_hash

    def replace(
        self,
        state: OpalWorkerState,
        group: int,
        tier: str,
        facts: Iterable[ObjectFact],
        buckets: bytes,
        *,
        keep_others: bool,
    ) -> Replaced:
        """Take in all that a tier holds, or all of some buckets."""
        wanted = frozenset(buckets)
        named: set[bytes] = set()
        before = self._block_count(state, group, tier)
        if not wanted and (group, tier) in state.places:
            state.places[group, tier].refused_blocks = 0
        for fact in facts:
            if wanted and not wanted.issuperset(fact.block_hashes[::HASH_BYTES]):
                continue  # not what was asked for
            if fact.group != group:
                fact = msgspec.structs.replace(fact, group=group)
            self.insert(state, tier, fact)
            if not keep_others:
                named.update(split_run(fact.block_hashes[fact.shared_blocks * HASH_BYTES :]))
        added_blocks = self._block_count(state, group, tier) - before
        if keep_others:
            return Replaced(added_blocks, 0)
        extra = [
            block_hash
            for _, block_hash in self.contents(state, group, tier, buckets)
            if block_hash not in named
        ]
        if extra:
            self._remove(state.places[group, tier], extra, b"".join(extra))
        return Replaced(added_blocks, len(extra))

    # ---- inside ----

    @staticmethod
    def _remove(place: Place, hashes: list[bytes], run: bytes) -> int:
        changed = place.index.delete(place.column, place.bit, hashes)
        place.digest.flip(run if len(changed) == len(hashes) else b"".join(changed))
        place.block_count -= len(changed)
        return len(changed)

    @staticmethod
    def _block_count(state: OpalWorkerState, group: int, tier: str) -> int:
        place = state.places.get((group, tier))
        return place.block_count if place is not None else 0

    def _has_room(self, block_count: int) -> bool:
        entries, segments = block_count, 2  # what a run can add at most
        for index in self.indexes():
            entries += index.block_count
            segments += index.tree.segment_count
        used_bytes = entries * BLOCK_BYTES + segments * SEGMENT_BYTES
        return entries <= self._max_entries and used_bytes <= self._max_bytes

    def _place(self, state: OpalWorkerState, group: int, tier: str) -> Place | None:
        """Where to write; None for more places than any worker has."""
        place = state.places.get((group, tier))
        if place is None and len(state.places) < _MOST_PLACES:
            places = self.places(state.description)
            places.note_tier(state.description.instance_id, state.tier(tier))
            place = state.places[group, tier] = Place(
                places.index(group, block_tokens_of(state.description, group)),
                places.column(state.tier(tier)),
                places.bit(state.description.instance_id),
                BucketDigests(),
            )
        return place


def split_run(run: bytes) -> list[bytes]:
    """The hashes of a run; none of one that is not made of whole hashes."""
    count, rest = divmod(len(run), HASH_BYTES)
    if rest:
        return []
    if count < len(_SPLITTERS):
        return list(_SPLITTERS[count].unpack(run))
    return [run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES)]
