"""Matches of models that mix kinds of attention against a naive model: every length is tried."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest, WorkerMatch
from opal_connector.events import DEVICE_TIER, Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import InstanceDescription, TierDescription, describe_layout
from opal_connector.keys import CHAIN_ROOT, RequestIdentity, TokenChain
from opal_connector.keys.attention import AttentionGroup, AttentionKind, AttentionLayout

UNIT = 4
SHARED_TIER = "Shared"
TIERS = (DEVICE_TIER, "CPUMemory", "LocalNVMe", SHARED_TIER)
KINDS = (
    AttentionKind.FULL,
    AttentionKind.SLIDING_WINDOW,
    AttentionKind.CHUNKED_LOCAL,
    AttentionKind.MAMBA,
)
Held = dict[tuple[str, int, str], set[bytes]]  # worker, group, tier


def sample_layout(rng: random.Random) -> AttentionLayout:
    """One to four groups of any kinds, with blocks of one to four hashed blocks."""
    groups: list[AttentionGroup] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(KINDS)
        size = UNIT * rng.choice((1, 1, 1, 2, 4))
        span = 0
        if kind is AttentionKind.SLIDING_WINDOW:
            span = rng.randint(1, 10 * UNIT)
        elif kind is AttentionKind.CHUNKED_LOCAL:
            span = UNIT * rng.randint(1, 8)
        extra = rng.choice((0, 0, 3)) if kind is AttentionKind.SLIDING_WINDOW else 0
        groups.append(
            AttentionGroup(kind=kind, block_tokens=size, span_tokens=span, extra_tokens=extra)
        )
    groups.sort(key=lambda group: group.retention != "all")
    if groups and min(group.block_tokens for group in groups) != UNIT:
        groups.append(
            AttentionGroup(kind=AttentionKind.SLIDING_WINDOW, block_tokens=UNIT, span_tokens=UNIT)
        )
    return AttentionLayout(tuple(groups))


def sample_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that begin alike, and part somewhere."""
    first = [rng.randrange(9) for _ in range(rng.randint(1, 30) * UNIT)]
    prompts = [first]
    for _ in range(rng.randint(0, 2)):
        shared = rng.choice(prompts)
        kept = rng.randrange(len(shared) + 1)
        prompts.append(shared[:kept] + [10] * rng.randint(1, 10 * UNIT))
    return prompts


def chain_of(prompt: list[int]) -> list[bytes]:
    chain = TokenChain(RequestIdentity(), UNIT)
    chain.extend(prompt)
    return chain.hashes


class World:
    """Workers with layouts of their own, in a KVBM and as plain sets."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kvbm = KVBM()
        self.layouts = {name: sample_layout(rng) for name in ("a", "b", "c")}
        if rng.random() < 0.5:
            self.layouts["b"] = self.layouts["a"]
        self.mounts = set(rng.sample(sorted(self.layouts), 2))
        self.prompts = sample_prompts(rng)
        self.chains = [chain_of(prompt) for prompt in self.prompts]
        self.held: Held = {}
        for name, layout in self.layouts.items():
            own = TIERS[:3] if name not in self.mounts else TIERS
            self.kvbm.join(
                InstanceDescription(
                    instance_id=name,
                    incarnation=1,
                    model="m",
                    block_tokens=UNIT,
                    tiers=tuple(
                        TierDescription(tier, shared_id="disk" if tier == SHARED_TIER else "")
                        for tier in own
                    ),
                    groups=describe_layout(layout),
                )
            )

    def own_blocks(self, group: AttentionGroup, chain: list[bytes]) -> list[bytes]:
        step = group.block_tokens // UNIT
        return chain[step - 1 :: step]

    def step(self) -> None:
        rng = self.rng
        name = rng.choice(sorted(self.layouts))
        layout = self.layouts[name]
        number = rng.randrange(len(layout.groups))
        blocks = self.own_blocks(layout.groups[number], rng.choice(self.chains))
        if not blocks:
            return
        start = 0 if rng.random() < 0.5 else rng.randrange(len(blocks))
        stop = len(blocks) if rng.random() < 0.4 else rng.randint(start + 1, len(blocks))
        run = blocks[start:stop]
        parent = blocks[start - 1] if start else CHAIN_ROOT
        fact = ObjectFact(number, parent, b"".join(run))
        tiers = TIERS if name in self.mounts else TIERS[:3]
        source, target = rng.sample(tiers, 2)
        event: KVCEvent
        what = rng.random()
        if what < 0.55:
            event = Insert(fact, target)
            self._of(name, number, target).update(run)
        elif what < 0.8:
            event = Delete(fact, target)
            self._of(name, number, target).difference_update(run)
        elif what < 0.9:
            event = Move(fact, source, target)
            self._of(name, number, target).update(run)
            self._of(name, number, source).difference_update(run)
        else:
            event = Copy(fact, source, target)
            self._of(name, number, target).update(run)
        self.kvbm.process_kvc_events(name, [event])

    def fill(self) -> None:
        """What a worker that has served a prompt may have: most blocks, with a few holes."""
        for name, layout in self.layouts.items():
            for number, group in enumerate(layout.groups):
                for chain in self.chains:
                    blocks = self.own_blocks(group, chain)
                    tier = self.rng.choice(TIERS[:3])
                    if blocks and self.rng.random() < 0.7:
                        fact = ObjectFact(number, CHAIN_ROOT, b"".join(blocks))
                        self.kvbm.process_kvc_events(name, [Insert(fact, tier)])
                        self._of(name, number, tier).update(blocks)

    def _of(self, name: str, group: int, tier: str) -> set[bytes]:
        return self.held.setdefault((name, group, tier), set())

    def has(self, name: str, group: int, block: bytes, *, on_device: bool) -> bool:
        if on_device:
            return block in self.held.get((name, group, DEVICE_TIER), ())
        own = any(block in self.held.get((name, group, tier), ()) for tier in TIERS[1:3])
        is_mounted = name in self.mounts
        return own or (
            is_mounted
            and any(
                block in self.held.get((other, group, SHARED_TIER), ())
                for other in self.mounts
                if self._same_group(name, other, group)
            )
        )

    def _same_group(self, name: str, other: str, number: int) -> bool:
        """A hash in a shared tier is of a group's number and block size."""
        ours, theirs = self.layouts[name].groups, self.layouts[other].groups
        return number < len(theirs) and theirs[number].block_tokens == ours[number].block_tokens

    def expected(self, name: str, prompt: list[int]) -> tuple[int, int]:
        """On the device, and in all."""
        chain, step = chain_of(prompt), self.layouts[name].alignment_tokens
        lengths = range(step, len(chain) * UNIT + 1, step)
        device = max((one for one in lengths if self._can(name, chain, one, None)), default=0)
        return device, max(
            (one for one in lengths if one > device and self._can(name, chain, one, device)),
            default=device,
        )

    def _can(self, name: str, chain: list[bytes], tokens: int, floor: int | None) -> bool:
        """Whether all groups have what `tokens` need: on the device, or in tiers behind a floor."""
        for number, group in enumerate(self.layouts[name].groups):
            blocks = self.own_blocks(group, chain)
            first, stop = group.needed_blocks(tokens)
            for block in range(max(first, (floor or 0) // group.block_tokens), stop):
                if not self.has(name, number, blocks[block], on_device=floor is None):
                    return False
        return True


def expect_equal(world: World) -> None:
    for prompt in world.prompts:
        request = PrefixRequest(token_ids=prompt)
        matches, scores = world.kvbm.match(request), world.kvbm.scorer(request)
        for name in world.layouts:
            device, total = world.expected(name, prompt)
            match = matches.get(name, WorkerMatch(0, 0))
            assert match.total_tokens == total
            blocks = len(prompt) // UNIT
            assert round(scores.get(name, 0.0) * blocks * UNIT) == total
            if total:
                assert match.device_tokens == device
                assert sum(match.tier_tokens.values()) == total - device


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_a_match_is_the_longest_length_of_which_every_group_has_what_it_needs(
    seed: int, steps: int
) -> None:
    """For any layouts and any stores, moves and evictions, as trying all lengths finds it."""
    world = World(random.Random(seed))
    if seed % 3:
        world.fill()
    for _ in range(steps):
        world.step()
    expect_equal(world)
    world.kvbm.check()
