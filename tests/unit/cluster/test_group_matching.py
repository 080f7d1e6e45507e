"""What is said of a match of a model that mixes kinds of attention, and what finding it costs."""

import msgspec
import pytest

from opal_connector.cluster import group_matching
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import (
    GroupDescription,
    InstanceDescription,
    TierDescription,
    describe_layout,
)
from opal_connector.keys import CHAIN_ROOT, RequestIdentity, TokenChain
from opal_connector.keys.attention import AttentionGroup, AttentionLayout, plain_layout

BLOCK = 16
MEMORY, DISK = "CPUMemory", "LocalNVMe"
FULL = AttentionGroup(block_tokens=BLOCK, kv_groups=(1,))
WINDOW = AttentionGroup(
    kind="sliding_window", block_tokens=BLOCK, kv_groups=(0, 2), span_tokens=2 * BLOCK
)
STATE = AttentionGroup(kind="mamba", block_tokens=BLOCK)


def chain(tokens: list[int]) -> list[bytes]:
    made = TokenChain(RequestIdentity(), BLOCK)
    made.extend(tokens)
    return made.hashes


def kvbm_of(*groups: AttentionGroup) -> KVBM:
    kvbm = KVBM()
    layout = AttentionLayout(groups)
    kvbm.join(
        InstanceDescription(
            instance_id="a",
            incarnation=1,
            model="m",
            block_tokens=layout.hash_block_tokens,
            tiers=(TierDescription(MEMORY), TierDescription(DISK)),
            groups=describe_layout(layout),
        )
    )
    return kvbm


def put(kvbm: KVBM, group: int, hashes: list[bytes], blocks: range, tier: str) -> None:
    parent = hashes[blocks.start - 1] if blocks.start else CHAIN_ROOT
    run = b"".join(hashes[blocks.start : blocks.stop])
    kvbm.process_kvc_events("a", [Insert(ObjectFact(group, parent, run), tier)])


TOKENS = list(range(12 * BLOCK))
HASHES = chain(TOKENS)


def test_tokens_are_counted_once_by_the_group_that_needs_them_all() -> None:
    """A window's blocks are loaded beside those of full attention, not instead of them."""
    kvbm = kvbm_of(FULL, WINDOW)
    put(kvbm, 0, HASHES, range(4), DEVICE_TIER)
    put(kvbm, 1, HASHES, range(2, 4), DEVICE_TIER)
    put(kvbm, 0, HASHES, range(4, 8), MEMORY)
    put(kvbm, 0, HASHES, range(8, 10), DISK)
    put(kvbm, 1, HASHES, range(7, 10), DISK)

    match = kvbm.match(PrefixRequest(token_ids=TOKENS))["a"]
    assert (match.total_tokens, match.device_tokens) == (10 * BLOCK, 4 * BLOCK)
    assert match.tier_tokens == {MEMORY: 4 * BLOCK, DISK: 2 * BLOCK}


def test_without_a_full_group_the_last_needed_block_tells_the_tier() -> None:
    """A model of windows alone loads a few blocks for all the tokens before them."""
    kvbm = kvbm_of(WINDOW)
    put(kvbm, 0, HASHES, range(8, 9), DISK)
    put(kvbm, 0, HASHES, range(9, 10), MEMORY)

    match = kvbm.match(PrefixRequest(token_ids=TOKENS))["a"]
    assert (match.total_tokens, match.device_tokens) == (10 * BLOCK, 0)
    assert match.tier_tokens == {MEMORY: 10 * BLOCK}


def test_the_shortest_of_the_groups_longest_is_no_match() -> None:
    """A chain of three blocks and a state behind the fourth serve nothing at all."""
    kvbm = kvbm_of(FULL, STATE)
    put(kvbm, 0, HASHES, range(3), MEMORY)
    put(kvbm, 1, HASHES, range(3, 4), MEMORY)
    assert kvbm.match(PrefixRequest(token_ids=TOKENS)) == {}
    put(kvbm, 1, HASHES, range(1, 2), MEMORY)
    assert kvbm.match(PrefixRequest(token_ids=TOKENS))["a"].total_tokens == 2 * BLOCK


def test_long_prompts_without_any_window_are_not_looked_through_block_by_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing block rules out every length that needs it, at once."""
    tokens = list(range(4_096 * BLOCK))
    hashes = chain(tokens)
    kvbm = kvbm_of(FULL, AttentionGroup(kind="sliding_window", block_tokens=BLOCK, span_tokens=512))
    put(kvbm, 0, hashes, range(4_096), DEVICE_TIER)
    for start in range(16, 4_096, 64):  # ends of windows without the windows
        put(kvbm, 1, hashes, range(start, start + 16), DEVICE_TIER)
    looked_at = 0
    lacking = group_matching._GroupChain.lacking

    def counted(self, *arguments):  # type: ignore[no-untyped-def]
        nonlocal looked_at
        looked_at += 1
        return lacking(self, *arguments)

    monkeypatch.setattr(group_matching._GroupChain, "lacking", counted)
    assert kvbm.match(PrefixRequest(token_ids=tokens)) == {}
    assert looked_at < 3 * 64, "about one look per run of blocks"


def test_an_instance_that_describes_no_layout_is_a_dense_one() -> None:
    """Those from before there were groups, and dense ones now, say the same two things."""
    wire = msgspec.msgpack.encode([0, "full_attention"])
    old = msgspec.msgpack.decode(wire, type=GroupDescription)
    assert old == GroupDescription(0, "full_attention")
    assert describe_layout(plain_layout(BLOCK)) == (GroupDescription(0, "full_attention"),)
    assert old.attention(BLOCK) == AttentionGroup(block_tokens=BLOCK)


def test_a_layout_is_described_and_read_back() -> None:
    """Windows, blocks and the engine's own numbers of every group cross the channel."""
    layout = AttentionLayout((FULL, WINDOW, STATE))
    described = describe_layout(layout)
    assert tuple(one.attention(BLOCK) for one in described) == layout.groups


@pytest.mark.parametrize(
    "group",
    [
        GroupDescription(1, "sliding_window"),
        GroupDescription(1, "chunked_local_attention"),
        GroupDescription(1, "brand_new"),
        GroupDescription(1, "full_attention", BLOCK + 1),
    ],
)
def test_a_group_that_cannot_be_reckoned_with_is_not_scored(group: GroupDescription) -> None:
    """Windows without a length divide by nothing, blocks between the hashes match nothing."""
    assert group.attention(BLOCK) is None


def test_blocks_of_a_group_whose_size_has_changed_are_forgotten() -> None:
    """The same hashes name longer pieces then."""
    kvbm = kvbm_of(FULL, WINDOW)
    put(kvbm, 0, HASHES, range(4), MEMORY)
    put(kvbm, 1, HASHES, range(4), MEMORY)
    description = kvbm.workers["a"].description
    groups = (description.groups[0], GroupDescription(1, "sliding_window", 2 * BLOCK, (0,), 40))
    kvbm.join(
        InstanceDescription(
            instance_id="a",
            incarnation=1,
            model="m",
            block_tokens=BLOCK,
            tiers=description.tiers,
            groups=groups,
        )
    )
    assert kvbm.workers["a"].block_counts == {(0, MEMORY): 4}
    kvbm.check()
