"""`KVBM`: what every instance of a cluster holds, tier by tier, and who could serve a prompt.

It learns from events alone, whoever brings them, and is driven by one thread; nothing here waits
or does I/O.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from opal_connector.cluster.block_book import BlockBook
from opal_connector.cluster.group_layout import block_tokens_of
from opal_connector.cluster.group_matching import group_depths, group_matches
from opal_connector.cluster.index_audit import audit_book
from opal_connector.cluster.matching import worker_matches
from opal_connector.cluster.places import HashedPrefix, ModelPlaces
from opal_connector.cluster.request import PrefixRequest, Replaced, WorkerMatch
from opal_connector.cluster.worker_state import OpalWorkerState
from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import InstanceDescription, SystemEvent, TierDigest
from opal_connector.keys import TokenChain


class KVBM:
    """The cluster-wide index of prefixes, and the state of every worker.

    Chains of block hashes carry adapter and salt from their first block on, so one index per model
    and block size keeps all of them apart. Mutable state: the workers and the indexes; used by one
    thread.

    Args:
        max_entries: Most distinct blocks; what does not fit is refused and counted.
        max_bytes: Most memory, as `used_bytes` counts it.
    """

    def __init__(self, *, max_entries: int = 20_000_000, max_bytes: int = 8 << 30) -> None:
        self._book = BlockBook(max_entries=max_entries, max_bytes=max_bytes)
        self._workers: dict[str, OpalWorkerState] = {}

    @property
    def workers(self) -> Mapping[str, OpalWorkerState]:
        """All workers by id."""
        return MappingProxyType(self._workers)

    @property
    def entry_count(self) -> int:
        """Distinct blocks of all models and groups."""
        return self._book.entry_count

    @property
    def used_bytes(self) -> int:
        """Memory that the index takes for what it holds; 0 when it holds nothing."""
        return self._book.used_bytes

    # ---- workers ----

    def join(self, description: InstanceDescription) -> None:
        """A worker is new, is described anew, or has started again.

        After a restart only what lies in persistent tiers is kept; what lies in a tier that is not
        what it was is forgotten.
        """
        worker_id = description.instance_id
        state = self._workers.get(worker_id)
        if state is not None and not _is_same_model(state.description, description):
            self.remove_worker(worker_id)
            state = None
        places = self._book.places(description)
        if state is None:
            self._workers[worker_id] = OpalWorkerState(description)
            places.enter(description)
            places.set_live(worker_id, is_live=True)
            return
        is_restart = state.description.incarnation != description.incarnation
        before = {name: state.tier(name) for _, name in state.places}
        sizes = {group: block_tokens_of(state.description, group) for group, _ in state.places}
        state.description = description
        for group, name in list(state.places):
            tier = state.tier(name)
            is_other = tier != before[name] or sizes[group] != block_tokens_of(description, group)
            if is_other or (is_restart and not tier.is_persistent):
                self._book.clear(state, group, name)
                del state.places[group, name]
        if is_restart:
            state.system = None
        places.enter(description)

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, with everything that it said."""
        state = self._workers.pop(worker_id, None)
        if state is None:
            return
        for group, tier in state.places:
            self._book.clear(state, group, tier)
        places = self._book.places(state.description)
        places.leave(worker_id)
        if places.is_empty:
            self._book.forget(places)

    def set_live(self, worker_id: str, *, is_live: bool) -> None:
        """Whether a worker is scored. What it holds is kept and followed all the same."""
        state = self._workers[worker_id]
        state.is_live = is_live
        self._book.places(state.description).set_live(worker_id, is_live=is_live)

    # ---- facts ----

    def process_kvc_events(self, worker_id: str, events: Iterable[KVCEvent]) -> None:
        """Take in facts of one worker, in the order in which they became true.

        Raises:
            KeyError: The worker has not joined.
        """
        state = self._workers[worker_id]
        for event in events:
            state.event_count += 1
            match event:
                case Insert(fact, tier):
                    self._book.insert(state, tier, fact)
                case Delete(fact, tier):
                    self._book.delete(state, tier, fact, fact.shared_blocks)
                case Copy(fact, _, target_tier):
                    self._book.insert(state, target_tier, fact)
                case Move(fact, source_tier, target_tier, source_shared_blocks):
                    self._book.insert(state, target_tier, fact)
                    self._book.delete(state, source_tier, fact, source_shared_blocks)

    def process_system_events(self, worker_id: str, events: Iterable[SystemEvent]) -> None:
        """Take note of a worker's load; the last one counts."""
        for event in events:
            self._workers[worker_id].system = event

    def clear_tier(self, worker_id: str, tier: str, group: int | None = None) -> int:
        """A worker's tier is empty. Costs a walk over the index.

        Returns:
            The number of blocks that left it.
        """
        state = self._workers[worker_id]
        return sum(
            self._book.clear(state, of_group, name)
            for of_group, name in list(state.places)
            if name == tier and group in (None, of_group)
        )

    # ---- comparison with what a worker really has ----

    def digests(self, worker_id: str) -> tuple[TierDigest, ...]:
        """Fingerprints of what is known of a worker, of every tier that holds something.

        One that is not complete is of a tier for which the index has had no room.
        """
        return tuple(
            TierDigest(
                group,
                tier,
                place.block_count,
                place.digest.buckets(),
                is_complete=not place.refused_blocks,
            )
            for (group, tier), place in self._workers[worker_id].places.items()
            if place.block_count or place.refused_blocks
        )

    def contents(
        self, worker_id: str, group: int, tier: str, buckets: bytes = b""
    ) -> Iterator[tuple[bytes, bytes]]:
        """The blocks of one tier, of some buckets or of all: the parent's hash and the block's.

        Costs a walk over the index. Not to be used while facts come in.
        """
        return self._book.contents(self._workers[worker_id], group, tier, buckets)

    def replace(
        self,
        worker_id: str,
        group: int,
        tier: str,
        facts: Iterable[ObjectFact],
        buckets: bytes = b"",
        *,
        keep_others: bool = False,
    ) -> Replaced:
        """Take in all that a tier holds, or all of some buckets; what is not named is gone.

        With `keep_others` what is not named stays.
        """
        state = self._workers[worker_id]
        return self._book.replace(state, group, tier, facts, buckets, keep_others=keep_others)

    # ---- questions ----

    def scorer(self, request: PrefixRequest) -> dict[str, float]:
        """Per live worker, which part of the prompt's whole blocks it could serve; none at 0."""
        scores: dict[str, float] = {}
        for prefix in self.hashed(request):
            total = len(prefix.hashes)
            blocks = self.matched_blocks(prefix.places, prefix.hashes, prefix.workers)
            scores.update((worker, count / total) for worker, count in blocks.items())
        return scores

    def match(self, request: PrefixRequest) -> dict[str, WorkerMatch]:
        """Per live worker what it could serve, with the tiers; none that could serve nothing."""
        return self.match_hashed(self.hashed(request))

    def hashed(self, request: PrefixRequest) -> list[HashedPrefix]:
        """The request's chain of hashes, once per block size and meaning of its adapter's name."""
        prefixes: list[HashedPrefix] = []
        for places in self._book.asked(request.model):
            for lora, workers in places.adapters(request.lora_name).items():
                chain = TokenChain(request.identity(lora), places.block_tokens)
                try:
                    chain.extend(request.token_ids)
                except OverflowError:  # a number that no engine takes for a token
                    continue
                prefixes.append(HashedPrefix(places, chain.hashes, workers))
        return prefixes

    def match_hashed(self, prefixes: Iterable[HashedPrefix]) -> dict[str, WorkerMatch]:
        """The same as `match`, of chains that are hashed already."""
        matches: dict[str, WorkerMatch] = {}
        for prefix in prefixes:
            places = prefix.places
            for scored, having in places.scored():
                mask = prefix.workers & places.live_mask & having
                if (only := scored.only_chain) is not None:
                    index = places.index(only)
                    matches |= worker_matches(places, index, prefix.hashes, mask)
                elif mask:
                    matches |= group_matches(places, scored, prefix.hashes, mask)
        return matches

    @staticmethod
    def matched_blocks(
        places: ModelPlaces, hashes: Sequence[bytes], workers: int = -1
    ) -> dict[str, int]:
        """Per live worker the hashed blocks of a chain that it could serve, in all groups."""
        matched: dict[str, int] = {}
        for scored, having in places.scored():
            mask = workers & places.live_mask & having
            if (only := scored.only_chain) is not None:
                matched |= places.index(only).depths(hashes, mask, places.names)
            elif mask:
                matched |= group_depths(places, scored, hashes, mask)
        return matched

    def announced_any(self, prefix: HashedPrefix, worker_id: str) -> bool:
        """Whether a worker has any block of a chain, wherever it is and whatever it is good for."""
        places = prefix.places
        scored = places.scored_by(worker_id)
        if scored is None:
            return False
        bit = places.bit(worker_id) & prefix.workers
        for number, group in scored.groups:
            blocks = places.index(number, group.block_tokens).tree.blocks
            step = group.block_tokens // places.block_tokens
            for block_hash in prefix.hashes[step - 1 :: step]:
                segment = blocks.get(block_hash)
                if segment is not None and any(mask & bit for mask in segment.held):
                    return True
        return False

    def models(self) -> Sequence[ModelPlaces]:
        """The models that are served, with their indexes."""
        return self._book.models()

    def check(self) -> None:
        """Recompute all books.

        Raises:
            AssertionError: They contradict each other.
        """
        audit_book(self._book, self._workers.values())


def _is_same_model(one: InstanceDescription, other: InstanceDescription) -> bool:
    return (one.model, one.block_tokens) == (other.model, other.block_tokens)
