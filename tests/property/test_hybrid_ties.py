"""What the ties of groups give up is worth nothing, whatever came before.

Which lengths an object serves follows from trying every length of every sequence that was ever
stored; hits never fall short because of a tie, and more tokens are hit in the same bytes.
"""

import random

import pytest
from hybrid_world import (
    begin,
    blocks_held,
    full,
    hybrid_manager,
    layout_of,
    local,
    longest_hit,
    look,
    mamba,
    tables_of,
    window,
)
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.eviction import POLICIES, make_policy
from opal_connector.keys import AttentionLayout
from opal_connector.managers import OpalKVCacheManager, OpalRequest, StateBlock, TierRules
from opal_connector.managers.records import ObjectKey, ObjectRecord
from opal_connector.transfers import JobResult

LAYOUTS = {
    "full and windows": layout_of(full(2), window(4, 2, 2)),
    "full and smaller blocks of a window": layout_of(full(4), window(6, 2)),
    "full and two windows": layout_of(full(2), window(4, 2), window(10, 2)),
    "full, windows and states": layout_of(full(4), window(5, 2, 3), mamba(4)),
    "full, windows and larger states": layout_of(full(2), window(6, 2), mamba(4)),
    "a draft, full and a window": layout_of(full(2, is_draft=True), full(4), window(8, 4)),
    "a window of a draft": layout_of(full(2), window(6, 2, is_draft=True)),
    "full, chunks and states": layout_of(full(2), local(8, 2), mamba(2)),
    "a window and states": layout_of(window(5, 2), mamba(4)),
}
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "remove", "upkeep"]),
        st.integers(0, 1 << 16),
    ),
    min_size=4,
    max_size=24,
)


def states_of(layout: AttentionLayout, tokens: int) -> list[StateBlock]:
    """The states at the last alignment before the end, and at the one half-way."""
    unit = layout.alignment_tokens
    ends = {tokens // unit * unit, tokens // 2 // unit * unit} - {0}
    return [
        StateBlock(kv_group, end // group.block_tokens, end)
        for group in layout.groups
        if group.retention == "last"
        for kv_group in group.kv_groups
        for end in sorted(ends)
    ]


def serve(manager: OpalKVCacheManager, tokens: list[int], prompt_tokens: int) -> int:
    """A request that loads what is there and stores the rest; returns the tokens of its hit."""
    layout = manager.layout
    request = begin(manager, tokens[:prompt_tokens])
    hit_tokens = look(manager, request)
    if hit_tokens:
        blocks = hit_tokens // layout.hash_block_tokens
        tables = tables_of(manager, hit_tokens)
        load = manager.plan_load(request, tables, first_block=0, block_count=blocks)
        manager.commit(JobResult(load.job_id, 0))
    request.extend(tokens)
    job = manager.plan_store(
        request,
        full_blocks=len(request.chain.hashes),
        tables=tables_of(manager, len(request.chain.hashes) * layout.hash_block_tokens),
        include_tail=True,
        states=states_of(layout, len(tokens)),
    )
    if job is not None:
        manager.commit(JobResult(job.job_id, 0))
    manager.end_request(request)
    return hit_tokens


def upkeep(manager: OpalKVCacheManager) -> None:
    while manager.wants_upkeep:
        batch = manager.plan_upkeep()
        for job in (*batch.copies, *batch.drops):
            manager.commit(JobResult(job.job_id, 0))


def objects(manager: OpalKVCacheManager) -> dict[ObjectKey, ObjectRecord]:
    tiers = manager.storage.tiers
    return {key: record for tier in tiers for key, record in tier.index.records.items()}


def is_servable(
    layout: AttentionLayout, request: OpalRequest, held: dict[int, set[bytes]], tokens: int
) -> bool:
    found = longest_hit(layout, request.chain, held, computed_tokens=0, most_tokens=tokens)
    return found == tokens


def expect_no_loss(manager: OpalKVCacheManager, known: list[OpalRequest]) -> None:
    """Every length that what is there serves is served without what is given up.

    A block of that may serve, where two sequences part inside an object: then another has it too.
    """
    layout = manager.layout
    held = blocks_held(manager, lambda record: True)
    wanted = blocks_held(manager, lambda record: not manager.storage.is_worthless(record.key))
    for request in known:
        most = len(request.chain.hashes) * layout.hash_block_tokens
        for tokens in range(layout.alignment_tokens, most + 1, layout.alignment_tokens):
            assert not is_servable(layout, request, held, tokens) or is_servable(
                layout, request, wanted, tokens
            ), "what serves a length is given up"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@given(
    steps=STEPS,
    rows=st.integers(16, 90),
    policy=st.sampled_from(list(POLICIES)),
    chunk_units=st.sampled_from([1, 2, 4]),
    has_second=st.booleans(),
)
def test_what_is_given_up_serves_no_length(
    layout: AttentionLayout,
    steps: list[tuple[str, int]],
    rows: int,
    policy: str,
    chunk_units: int,
    has_second: bool,
) -> None:
    """Under any order of stores, removals and copies, with every policy, in one tier and in two."""
    manager = hybrid_manager(
        layout,
        rows=[rows, 2 * rows][: 1 + has_second],
        chunk_tokens=chunk_units * layout.alignment_tokens,
        rules=[TierRules("off"), TierRules(admission="always")][: 1 + has_second],
        policy=lambda: make_policy(policy),
    )
    known: list[OpalRequest] = []
    for verb, number in steps:
        if verb == "store":
            length, parting = (24, 16, 10, 9)[number % 4], (0, 8, 10, 12, 20)[number // 4 % 5]
            family = 1 + number // 20 % 3
            tokens = [at if at < parting else 100 * family + at for at in range(length)]
            serve(manager, tokens, length)
            known.append(begin(manager, tokens))
        elif verb == "upkeep":
            upkeep(manager)
        elif objects(manager):
            keys = sorted(objects(manager))
            tier = manager.storage.tiers[number % len(manager.storage.tiers)]
            tier.remove(keys[number % len(keys)])
        manager.check()
        expect_no_loss(manager, known)


def hit_tokens_of_chats(policy: str, *, is_tied: bool, seed: int) -> int:
    """Tokens hit by chats of which some go on much more often, in room for a few of them."""
    layout = LAYOUTS["full and windows"]
    manager = hybrid_manager(layout, rows=[400], chunk_tokens=8, policy=lambda: make_policy(policy))
    if not is_tied:
        for tier in manager.storage.tiers:
            tier.index.watcher = None
    chance = random.Random(seed)
    chats: dict[int, list[int]] = {}
    hit_tokens = 0
    for _ in range(160):
        chat = int(chance.paretovariate(0.9)) % 60
        tokens = chats.get(chat, [])
        if not tokens or len(tokens) > 80:
            tokens = [9] * 8 + [1000 * chat + at for at in range(chance.randrange(8, 40))]
        answer = [1000 * chat + 500 + len(tokens) + at for at in range(chance.randrange(4, 16))]
        hit_tokens += serve(manager, tokens + answer, len(tokens))
        chats[chat] = tokens + answer
    manager.check()
    return hit_tokens


def hit_tokens_with_and_without(policy: str) -> tuple[int, int]:
    seeds = range(4)
    return (
        sum(hit_tokens_of_chats(policy, is_tied=True, seed=seed) for seed in seeds),
        sum(hit_tokens_of_chats(policy, is_tied=False, seed=seed) for seed in seeds),
    )


def test_ties_cost_no_hits_where_order_of_use_decides() -> None:
    """In an order of use a window stands just before the chain that is worth nothing without it."""
    tied, untied = hit_tokens_with_and_without("LRU")

    assert tied >= untied > 0


def test_ties_bring_hits_where_frequency_decides() -> None:
    """There a chain goes and its windows stay: their room serves others."""
    tied, untied = hit_tokens_with_and_without("W-TinyLFU")

    assert tied > 1.02 * untied > 0
