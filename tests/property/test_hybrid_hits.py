"""Hits of models with several kinds of attention, beside a search through all lengths."""

import random

import pytest

pytest.importorskip("hypothesis")
from hybrid_world import (
    blocks_held,
    full,
    group_hashes,
    hashes_of,
    hybrid_manager,
    layout_of,
    local,
    longest_hit,
    mamba,
    window,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opal_connector.keys import CHAIN_ROOT, AttentionLayout, RequestIdentity, TokenChain
from opal_connector.managers import HitPlan, ObjectRecord, ObjectSpec, OpalKVCacheManager
from opal_connector.managers.audit import audit_tier

SIZES = st.sampled_from([2, 4, 8])
MEMBERS = st.sampled_from([1, 1, 2, 3])
SPANS = st.integers(1, 26)
CHAINS = st.builds(full, SIZES, MEMBERS, is_draft=st.sampled_from([False, False, True]))
OTHERS = st.one_of(
    st.builds(window, SPANS, SIZES, MEMBERS, is_draft=st.sampled_from([False, False, True])),
    st.builds(local, SPANS, SIZES, MEMBERS),
    st.builds(mamba, SIZES, MEMBERS),
)
LAYOUTS = (
    st.tuples(st.lists(CHAINS, max_size=2), st.lists(OTHERS, max_size=3))
    .filter(lambda parts: parts[0] or parts[1])
    .map(lambda parts: layout_of(*parts[0], *parts[1]))
    .filter(lambda layout: not layout.is_plain)
)
TOKENS = 64  # of a sequence
TALLIES = {"hits": 0, "waits": 0, "junctions": 0, "parts": 0}


class World:
    """Books in which objects of a few sequences that begin alike are, come and are loaded.

    Mutable state: the books and the chance that filled them.
    """

    def __init__(
        self, layout: AttentionLayout, chunk_units: int, tiers: int, chance: random.Random
    ) -> None:
        self.layout = layout
        self.chance = chance
        self.manager: OpalKVCacheManager = hybrid_manager(
            layout, rows=[4000] * tiers, chunk_tokens=chunk_units * layout.alignment_tokens
        )
        self.chains = [self.chain(0), *(self.chain(chance.randrange(TOKENS)) for _ in range(2))]

    def chain(self, parting: int) -> TokenChain:
        """A sequence that is another from a token on; from 0 on it is the one looked up."""
        tokens = [token if not parting or token < parting else token + 1000 for token in range(70)]
        chain = TokenChain(RequestIdentity(), self.layout.hash_block_tokens)
        chain.extend(tokens[: TOKENS - self.chance.randrange(12)])
        return chain

    def fill(self, presence: float, *, moves: bool) -> None:
        """Store units of all sequences by chance; with `moves`, some come or are being loaded."""
        for chain in self.chains:
            for group, manager in enumerate(self.manager.coordinator.managers):
                hashes = group_hashes(self.layout, chain, group)
                for first in range(0, len(hashes), manager.chunk_blocks):
                    stop = min(first + manager.chunk_blocks, len(hashes))
                    if self.chance.random() > presence:
                        if manager.is_chain:
                            break
                        continue
                    if self.chance.random() < 0.15:
                        stop = self.chance.randrange(first, stop) + 1  # a tail of somebody
                    self.put(group, hashes, first, stop, moves=moves)

    def put(self, group: int, hashes: list[bytes], first: int, stop: int, *, moves: bool) -> None:
        parent = hashes[first - 1] if first else CHAIN_ROOT
        spec = ObjectSpec(group, parent, b"".join(hashes[first:stop]), first)
        tier = self.chance.choice(self.manager.storage.tiers)
        record = tier.reserve(spec)
        if not isinstance(record, ObjectRecord):
            return
        fate = self.chance.random() if moves else 1.0
        if fate < 0.12:
            return  # it is being written
        tier.commit(record, stored=True)
        if fate < 0.24 and record.is_readable:
            tier.pin(record, loading=True)

    def lengths(self, computed_tokens: int, most_tokens: int) -> tuple[int, int, int, int]:
        """The longest hit of what is idle, of what is there, of what is coming too; and of chains.

        What is idle are the blocks of units of which no object is being loaded: of two objects
        that bring the same, the books look at one.
        """
        chain = self.chains[0]
        loading = blocks_held(self.manager, lambda record: record.loads > 0)
        there = blocks_held(self.manager, lambda record: record.is_readable)
        known = blocks_held(self.manager, lambda _: True)
        idle = {group: set(blocks) for group, blocks in there.items()}
        for group, manager in enumerate(self.manager.coordinator.managers):
            hashes = group_hashes(self.layout, chain, group)
            for first in range(0, len(hashes), manager.chunk_blocks):
                unit = set(hashes[first : first + manager.chunk_blocks])
                if unit & loading[group]:
                    idle[group] -= unit
        chains = [
            group for group, one in enumerate(self.manager.coordinator.managers) if one.is_chain
        ]
        most = {"computed_tokens": computed_tokens, "most_tokens": most_tokens}
        reach = longest_hit(self.layout, chain, known, **most, groups=chains) if chains else 0
        return (
            longest_hit(self.layout, chain, idle, **most),
            longest_hit(self.layout, chain, there, **most),
            longest_hit(self.layout, chain, known, **most),
            reach,
        )

    def find(self, computed_blocks: int, max_blocks: int) -> HitPlan:
        return self.manager.coordinator.find_hit(
            self.chains[0], computed_blocks=computed_blocks, max_blocks=max_blocks
        )

    def check_segments(self, plan: HitPlan, computed_tokens: int, tokens: int) -> None:
        """They bring exactly the blocks that the hit needs, out of objects that have them."""
        brought: dict[int, list[int]] = {group: [] for group in range(len(self.layout.groups))}
        for segment in plan.segments:
            record = segment.record
            assert record.is_readable, "counts on what cannot be read"
            assert not record.loads, "counts on what is being loaded"
            assert self.manager.storage.tiers[segment.tier].index.is_current(record)
            hashes = group_hashes(self.layout, self.chains[0], record.group)
            wanted = hashes[segment.first_block : segment.first_block + segment.block_count]
            start = segment.object_offset
            assert hashes_of(record.run)[start : start + segment.block_count] == wanted
            brought[record.group] += range(
                segment.first_block, segment.first_block + segment.block_count
            )
            TALLIES["parts"] += segment.block_count < record.block_count
        for group, attention in enumerate(self.layout.groups):
            first, stop = attention.needed_blocks(tokens)
            first = max(first, computed_tokens // attention.block_tokens)
            wanted_blocks = list(range(first, stop)) if tokens > computed_tokens else []
            assert brought[group] == wanted_blocks, attention
        counted = sum(segment.hit_tokens for segment in plan.segments)
        assert counted == (tokens - computed_tokens if plan.segments else 0)


@settings(max_examples=16 * settings().max_examples)
@given(
    layout=LAYOUTS,
    chunk_units=st.sampled_from([1, 2, 3, 4]),
    tiers=st.sampled_from([1, 2]),
    presence=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
    moves=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@example(layout_of(full(), window(5)), 2, 1, 1.0, False, 1)
def test_hit_is_the_longest_length_that_every_group_can_serve(
    layout: AttentionLayout,
    chunk_units: int,
    tiers: int,
    presence: float,
    moves: bool,
    seed: int,
) -> None:
    """Exactly that if nothing is loaded; what is loaded does not count, and one waits for it."""
    chance = random.Random(seed)
    world = World(layout, chunk_units, tiers, chance)
    world.fill(presence, moves=moves)
    block_tokens, unit = layout.hash_block_tokens, layout.alignment_tokens
    blocks = len(world.chains[0].hashes)
    for _ in range(4):
        computed_blocks = chance.choice([0, 0, chance.randrange(blocks + 1)])
        max_blocks = chance.choice([blocks, chance.randrange(blocks + 1)])
        computed_tokens = computed_blocks * block_tokens

        plan = world.find(computed_blocks, max_blocks)

        if computed_tokens % unit:
            assert plan == HitPlan(0, (), is_waiting=False)
            continue
        idle, there, known, reach = world.lengths(computed_tokens, max_blocks * block_tokens)
        tokens = computed_tokens + plan.block_count * block_tokens
        assert idle <= tokens <= there
        world.check_segments(plan, computed_tokens, tokens)
        assert plan.is_waiting == (known > tokens)
        junction = reach // block_tokens if reach > max(known, computed_tokens) else 0
        assert plan.junction_blocks == junction
        TALLIES["hits"] += plan.block_count > 0
        TALLIES["waits"] += plan.is_waiting
        TALLIES["junctions"] += junction > 0
    for tier in world.manager.storage.tiers:
        audit_tier(tier)


def test_the_search_has_seen_everything() -> None:
    """The test above is worth something: hits, parts of objects, waits and junctions occur."""
    if not TALLIES["hits"]:
        pytest.skip("it did not run")
    assert min(TALLIES.values()) > 20, TALLIES
