"""How far each worker could serve a sequence of a model that mixes kinds of attention.

A length can be served if every group has what it needs to go on from there; that may be true of a
long one and false of a shorter one. So candidates are tried from the longest down, and whoever
lacks a block goes on where nothing needs that block any more.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from opal_connector.cluster.group_layout import ScoredGroups
from opal_connector.cluster.index import DEVICE_COLUMN, PrefixIndex
from opal_connector.cluster.matching import tier_sources
from opal_connector.cluster.places import ModelPlaces
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.segments import Segment
from opal_connector.keys.attention import AttentionGroup

Presence = Callable[[PrefixIndex, Segment], int]
Lengths = dict[int, int]  # tokens to workers
Found = list[tuple[int, int, int]]  # tokens on the device, tokens in all, workers


class _GroupChain:
    """One group along one sequence: the hashes of its own blocks, and where they are looked up."""

    __slots__ = ("_presence", "group", "hashes", "index")

    def __init__(
        self,
        index: PrefixIndex,
        group: AttentionGroup,
        hashes: Sequence[bytes],
        presence: Presence,
    ) -> None:
        self.index = index
        self.group = group
        self.hashes = hashes
        self._presence = presence

    def lacking(self, start: int, stop: int, workers: int) -> Iterator[tuple[int, int]]:
        """The first block from `start` up to `stop` that some of the workers lack, and who."""
        presence, index = self._presence, self.index
        for begin, _, segment in index.tree.pieces(self.hashes, start, stop):
            having = workers & presence(index, segment) if segment is not None else 0
            if having != workers:
                yield begin, workers ^ having
                workers = having
                if not workers:
                    return

    def next_held(self, tokens: int, floor: int, step: int) -> int:
        """The longest length from `tokens` down whose last block anybody holds, or the floor."""
        if self.group.retention == "chunk":
            return tokens  # some lengths need no block
        blocks, hashes, size = self.index.tree.blocks, self.hashes, self.group.block_tokens
        while tokens > floor and hashes[tokens // size - 1] not in blocks:
            tokens -= step
        return tokens


class _Sequence:
    """All groups along one sequence."""

    def __init__(self, places: ModelPlaces, scored: ScoredGroups, hashes: Sequence[bytes]) -> None:
        self._unit = places.block_tokens
        self._hashes = hashes
        self._cut: dict[int, Sequence[bytes]] = {self._unit: hashes}
        self._places = places
        self._scored = scored
        self.alignment_tokens = scored.alignment_tokens
        self.tokens = self._unit * len(hashes)
        self.tokens -= self.tokens % self.alignment_tokens

    def of(self, numbered: tuple[int, AttentionGroup], presence: Presence) -> _GroupChain:
        """One group."""
        number, group = numbered
        size = group.block_tokens
        hashes = self._cut.get(size)
        if hashes is None:
            step = size // self._unit
            hashes = self._cut[size] = self._hashes[step - 1 :: step]
        return _GroupChain(self._places.index(number, size), group, hashes, presence)

    def longest(self, presence: Presence, starts: Lengths) -> Found:
        """The longest length that workers can serve of what lies at or behind where they start.

        Those that can serve no more have where they start.
        """
        found: Found = []
        ends = self._chain_ends(presence, starts)
        partial = [self.of(numbered, presence) for numbered in self._scored.partial]
        step = self.alignment_tokens
        for start, workers in starts.items():
            limits: Lengths = {}
            for bit in _bits(workers & ends.cut) if ends.cut else ():
                end = max(start, ends.by_worker[bit])
                limits[end] = limits.get(end, 0) | bit
            if workers & ~ends.cut:
                limits[self.tokens] = limits.get(self.tokens, 0) | workers & ~ends.cut
            longest = _candidates(partial, step, start, limits)
            found += ((start, tokens, served) for tokens, served in longest.items())
        return found

    def _chain_ends(self, presence: Presence, starts: Lengths) -> "_Ends":
        """Where the groups that need everything end, of workers that end before the sequence."""
        ends = _Ends()
        order = sorted(starts)
        for numbered in self._scored.whole:
            chain = self.of(numbered, presence)
            size = chain.group.block_tokens
            active = 0
            for start, stop in pairwise([*order, self.tokens]):
                active |= starts[start]
                lacking = chain.lacking(start // size, stop // size, active) if active else ()
                for block, lost in lacking:
                    active ^= lost
                    ends.cut_at(block * size, lost)
        return ends


class _Ends:
    """Who ends before the sequence, and where. Mutable state: both."""

    __slots__ = ("by_worker", "cut")

    def __init__(self) -> None:
        self.cut = 0
        self.by_worker: dict[int, int] = {}

    def cut_at(self, tokens: int, workers: int) -> None:
        """Some end here, unless they ended before."""
        self.cut |= workers
        for bit in _bits(workers):
            known = self.by_worker.get(bit)
            if known is None or tokens < known:
                self.by_worker[bit] = tokens


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _candidates(partial: list[_GroupChain], step: int, floor: int, limits: Lengths) -> Lengths:
    """The longest lengths up to their limits for which the other groups have what they need.

    If a block is missing that a length needs, every length down to where the block begins needs it
    too: what is looked back on begins no later for a shorter one.
    """
    waiting: Lengths = {}
    for limit, workers in limits.items():
        tokens = max(floor, limit - limit % step)
        waiting[tokens] = waiting.get(tokens, 0) | workers
    order = [-tokens for tokens in waiting]
    heapify(order)
    found: Lengths = {}
    while order:
        tokens = -heappop(order)
        workers = waiting.pop(tokens)
        for chain in partial if tokens > floor else ():
            group, size = chain.group, chain.group.block_tokens
            start, stop = group.needed_blocks(tokens)
            lost_here = workers
            for block, lost in chain.lacking(max(start, floor // size), stop, workers):
                shorter = max(floor, block * size - block * size % step)
                shorter = chain.next_held(shorter, floor, step)
                if shorter not in waiting:
                    heappush(order, -shorter)
                waiting[shorter] = waiting.get(shorter, 0) | lost
                lost_here ^= lost
            workers = lost_here
            if not workers:
                break
        if workers:
            found[tokens] = found.get(tokens, 0) | workers
    return found


def _on_device(_: PrefixIndex, segment: Segment) -> int:
    return segment.held[DEVICE_COLUMN]


def _in_tiers(index: PrefixIndex, segment: Segment) -> int:
    return index.served_from_tiers(segment)


def _found(places: ModelPlaces, sequence: _Sequence, workers: int) -> Found:
    """What is on the device, and behind that what tiers continue, as the connector loads it."""
    found: Found = []
    with_tiers = 0
    for tiers, having in places.tier_orders():
        with_tiers |= having if tiers else 0
    loading: Lengths = {}
    for _, tokens, served in sequence.longest(_on_device, {0: workers}):
        if tokens < sequence.tokens and served & with_tiers:
            loading[tokens] = served & with_tiers
            served &= ~with_tiers
        if served:
            found.append((tokens, tokens, served))
    return found + sequence.longest(_in_tiers, loading)


def group_depths(
    places: ModelPlaces, scored: ScoredGroups, hashes: Sequence[bytes], workers: int
) -> dict[str, int]:
    """Per worker the hashed blocks from the start of a sequence that it could serve, if any."""
    depths: dict[str, int] = {}
    for _, tokens, served in _found(places, _Sequence(places, scored, hashes), workers):
        if tokens:
            depths |= dict.fromkeys(places.names.of(served), tokens // places.block_tokens)
    return depths


def group_matches(
    places: ModelPlaces, scored: ScoredGroups, hashes: Sequence[bytes], workers: int
) -> dict[str, WorkerMatch]:
    """The same in tokens, with what is on the device and from which tier the rest would come."""
    sequence = _Sequence(places, scored, hashes)
    matches: dict[str, WorkerMatch] = {}
    for on_device, tokens, served in _found(places, sequence, workers):
        if not tokens:
            continue
        loaded: dict[str, dict[str, int]] = {name: {} for name in places.names.of(served)}
        for begin, end, tier, mask in _loads(places, scored, sequence, (on_device, tokens, served)):
            for name in places.names.of(mask):
                mine = loaded[name]
                mine[tier] = mine.get(tier, 0) + end - begin
        for name, tiers in loaded.items():
            matches[name] = WorkerMatch(tokens, on_device, tiers)
    return matches


def _loads(
    places: ModelPlaces, scored: ScoredGroups, sequence: _Sequence, found: tuple[int, int, int]
) -> Iterator[tuple[int, int, str, int]]:
    """From where to where workers would load tokens from a tier; every token once.

    Where there is a group that needs everything it tells; else the last block that is needed.
    """
    on_device, tokens, served = found
    if tokens == on_device:
        return
    if scored.whole:
        chain = sequence.of(scored.whole[0], _in_tiers)
        size = chain.group.block_tokens
        start, stop = on_device // size, tokens // size
        for begin, end, segment in chain.index.tree.pieces(chain.hashes, start, stop):
            if segment is not None:
                for tier, mask in tier_sources(places, chain.index, segment, served):
                    yield begin * size, end * size, tier, mask
        return
    for numbered in scored.partial:
        chain = sequence.of(numbered, _in_tiers)
        first, stop = chain.group.needed_blocks(tokens)
        segment = chain.index.tree.blocks.get(chain.hashes[stop - 1]) if first < stop else None
        if segment is not None:
            for tier, mask in tier_sources(places, chain.index, segment, served):
                yield on_device, tokens, tier, mask
            return
