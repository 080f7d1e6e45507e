"""Engine hashes become Opal's digests, whatever the engine calls its blocks."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import EngineHash, StoredBlocks
from opal_connector.events import Delete, Insert
from opal_connector.keys import (
    CHAIN_ROOT,
    LoraIdentity,
    MultimodalSpan,
    RequestIdentity,
    TokenChain,
)

SIZE = 4
TIER = "Device"


def tokens_of(blocks: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1 << 17) for _ in range(blocks * SIZE)]


def digests_of(tokens: list[int], identity: RequestIdentity | None = None) -> list[bytes]:
    chain = TokenChain(identity or RequestIdentity(), SIZE)
    chain.extend(tokens)
    return chain.hashes


def stored(
    hashes: Sequence[EngineHash],
    tokens: list[int],
    parent: EngineHash | None = None,
    group: int = 0,
    tier: str = TIER,
    **more: Any,
) -> StoredBlocks:
    return StoredBlocks(group, tier, hashes, parent, tokens, SIZE, **more)


def run_of(events: list[Insert] | list[Delete]) -> list[bytes]:
    joined = b"".join(event.fact.block_hashes for event in events)
    return [joined[start : start + 32] for start in range(0, len(joined), 32)]


# ---- digests ----


@pytest.mark.parametrize("hashes", [[11, 12, 13], [b"a" * 32, b"b" * 32, b"c" * 32]])
def test_blocks_get_the_digests_of_the_chain(hashes: list[EngineHash]) -> None:
    tokens = tokens_of(3)
    chain = EngineChain()
    events = chain.stored(stored(hashes, tokens))
    assert run_of(events) == digests_of(tokens)
    assert [event.fact.parent_hash for event in events] == [CHAIN_ROOT]


def test_blocks_that_follow_later_continue_the_chain() -> None:
    tokens = tokens_of(4)
    chain = EngineChain()
    chain.stored(stored([1, 2], tokens[: 2 * SIZE]))
    events = chain.stored(stored([3, 4], tokens[2 * SIZE :], parent=2))
    expected = digests_of(tokens)
    assert run_of(events) == expected[2:]
    assert events[0].fact.parent_hash == expected[1]
    assert chain.held(0, TIER) == list(zip([CHAIN_ROOT, *expected[:-1]], expected, strict=True))


def test_adapter_and_salt_give_the_digests_of_such_a_request() -> None:
    tokens = tokens_of(2)
    lora = LoraIdentity("tuned", "/adapters/tuned", "f1")
    chain = EngineChain(lambda name: lora if name == "tuned" else None)
    events = chain.stored(
        stored([1, 2], tokens, lora_name="tuned", extra_keys=[("tuned", "pepper"), ("tuned",)])
    )
    assert run_of(events) == digests_of(tokens, RequestIdentity(lora, "pepper"))


def test_a_salt_that_is_called_like_the_adapter_is_still_a_salt() -> None:
    tokens = tokens_of(1)
    events = EngineChain().stored(
        stored([1], tokens, lora_name="same", extra_keys=[("same", "same")])
    )
    identity = RequestIdentity(LoraIdentity("same", "", ""), "same")
    assert run_of(events) == digests_of(tokens, identity)


def test_an_adapter_of_a_plain_stream_is_known_by_its_name_alone() -> None:
    tokens = tokens_of(1)
    events = EngineChain().stored(stored([1], tokens, lora_name="x", extra_keys=None))
    assert run_of(events) == digests_of(tokens, RequestIdentity(LoraIdentity("x", "", "")))


@pytest.mark.parametrize("split", range(1, 6))
@pytest.mark.parametrize("salt", [None, "pepper"])
def test_images_over_several_blocks_give_the_digests_of_such_a_request(
    split: int, salt: str | None
) -> None:
    tokens = tokens_of(6)
    spans = (
        MultimodalSpan("cat", 2, 9),
        MultimodalSpan("dog", 12, 1),
        MultimodalSpan("cow", 17, 7),
    )
    keys: list[Any] = []
    for index in range(6):
        start, end = index * SIZE, (index + 1) * SIZE
        entry: list[Any] = [
            [span.identifier, span.offset_tokens - start]
            for span in spans
            if span.offset_tokens < end and span.offset_tokens + span.length_tokens > start
        ]
        if index == 0 and salt is not None:
            entry.append(salt)
        keys.append(entry or None)
    chain = EngineChain()
    hashes = list(range(100, 106))
    events = chain.stored(stored(hashes[:split], tokens[: split * SIZE], extra_keys=keys[:split]))
    events += chain.stored(
        stored(hashes[split:], tokens[split * SIZE :], hashes[split - 1], extra_keys=keys[split:])
    )
    assert run_of(events) == digests_of(tokens, RequestIdentity(None, salt, spans))


@pytest.mark.parametrize("key", [b"embedding", "a salt in the middle", ["cat", "x"], 7])
def test_what_opal_has_no_digest_for_is_counted_and_never_named(key: Any) -> None:
    tokens = tokens_of(3)
    chain = EngineChain()
    events = chain.stored(stored([1, 2, 3], tokens, extra_keys=[None, (key,), None]))
    assert run_of(events) == digests_of(tokens)[:1]
    assert chain.undigestible_blocks == 1
    assert chain.unnamed_blocks == 2
    assert run_of(chain.removed(0, TIER, [3, 2, 1])) == digests_of(tokens)[:1]
    assert chain.unnamed_blocks == 0


@pytest.mark.parametrize("bad", [-1, 1 << 40, "x"])
def test_tokens_that_are_none_name_nothing(bad: Any) -> None:
    chain = EngineChain()
    assert chain.stored(stored([1], [1, 2, 3, bad])) == []
    assert chain.undigestible_blocks == 1


# ---- presence ----


def test_a_block_is_inserted_with_its_first_copy_and_deleted_with_its_last() -> None:
    tokens = tokens_of(3)
    expected = digests_of(tokens)
    chain = EngineChain()
    chain.stored(stored([1], tokens[:SIZE]))
    assert run_of(chain.stored(stored([2, 3], tokens[SIZE:], parent=1))) == expected[1:]
    assert chain.stored(stored([2], tokens[SIZE : 2 * SIZE], parent=1)) == []
    assert chain.removed(0, TIER, [2]) == []
    assert run_of(chain.removed(0, TIER, [2, 3])) == expected[1:]
    assert chain.held(0, TIER) == [(CHAIN_ROOT, expected[0])]


def test_a_full_report_leaves_no_phantom_when_its_blocks_leave_once() -> None:
    tokens = tokens_of(3)
    chain = EngineChain()
    chain.stored(stored([1, 2, 3], tokens))
    for _ in range(3):
        assert chain.stored(stored([1, 2], tokens[: 2 * SIZE])) == []
        assert chain.stored(stored([1, 2, 3], tokens, is_report=True)) == []
    assert run_of(chain.removed(0, TIER, [3, 2, 1])) == digests_of(tokens)[::-1]
    assert chain.held(0, TIER) == []


def test_whoever_knows_that_it_is_no_report_gets_every_copy_counted() -> None:
    tokens = tokens_of(2)
    chain = EngineChain()
    for _ in range(2):
        chain.stored(stored([1, 2], tokens, is_report=False))
    assert chain.removed(0, TIER, [1, 2]) == []
    assert run_of(chain.removed(0, TIER, [2])) == digests_of(tokens)[1:]


def test_a_report_of_blocks_that_were_missed_inserts_them() -> None:
    tokens = tokens_of(2)
    assert run_of(EngineChain().stored(stored([1, 2], tokens, is_report=True))) == digests_of(
        tokens
    )


def test_groups_and_tiers_are_apart_and_share_what_is_known() -> None:
    tokens = tokens_of(2)
    expected = digests_of(tokens)
    chain = EngineChain()
    chain.stored(stored([1, 2], tokens))
    chain.stored(stored([1, 2], tokens, group=1))
    without_tokens = StoredBlocks(0, "CPU", [2], 1, (), 0)
    assert run_of(chain.stored(without_tokens)) == expected[1:]
    assert run_of(chain.removed(0, TIER, [2])) == expected[1:]
    assert chain.held(1, TIER) == [(CHAIN_ROOT, expected[0]), (expected[0], expected[1])]
    assert chain.held(0, "CPU") == [(expected[0], expected[1])]


def test_two_engine_hashes_of_one_digest_are_one_block() -> None:
    tokens = tokens_of(1)
    chain = EngineChain()
    assert len(chain.stored(stored([1], tokens))) == 1
    assert chain.stored(stored([2], tokens)) == []
    assert chain.removed(0, TIER, [1]) == []
    assert run_of(chain.removed(0, TIER, [2])) == digests_of(tokens)


def test_a_removal_of_something_unknown_is_counted_and_does_nothing() -> None:
    chain = EngineChain()
    assert chain.removed(0, TIER, [1]) == []
    chain.stored(stored([1], tokens_of(1)))
    assert chain.removed(0, TIER, [2]) == []
    assert chain.removed(1, TIER, [1]) == []
    assert chain.counters.unknown_removals == 3


def test_clearing_names_every_block_of_the_tier_in_bounded_events() -> None:
    tokens = tokens_of(2_500)
    chain = EngineChain()
    chain.stored(stored(range(2_500), tokens))
    chain.stored(stored([7_000], tokens[:SIZE], group=1))
    chain.stored(stored(range(3), tokens[: 3 * SIZE], tier="CPU"))
    events = chain.cleared(TIER)
    assert sorted(run_of([event for event in events if event.fact.group == 0])) == sorted(
        digests_of(tokens)
    )
    assert {event.fact.group for event in events} == {0, 1}
    assert max(len(event.fact.block_hashes) for event in events) <= 1_024 * 32
    assert chain.held(0, TIER) == chain.held(1, TIER) == []
    assert len(chain.held(0, "CPU")) == 3
    assert chain.cleared(TIER) == []


def test_inserts_are_bounded_and_each_is_a_chain() -> None:
    tokens = tokens_of(2_500)
    events = EngineChain().stored(stored(range(2_500), tokens))
    assert [len(event.fact.block_hashes) // 32 for event in events] == [1_024, 1_024, 452]
    expected = digests_of(tokens)
    assert events[1].fact.parent_hash == expected[1_023]


# ---- what cannot be named yet ----


def test_a_block_with_an_unknown_parent_waits_for_it_and_is_not_rooted_anew() -> None:
    tokens = tokens_of(6)
    expected = digests_of(tokens)
    chain = EngineChain()
    assert chain.stored(stored([5, 6], tokens[4 * SIZE :], parent=4)) == []
    assert chain.stored(stored([3, 4], tokens[2 * SIZE : 4 * SIZE], parent=2)) == []
    assert chain.parked_count == 2
    assert sorted(run_of(chain.stored(stored([1, 2], tokens[: 2 * SIZE])))) == sorted(expected)
    assert chain.parked_count == chain.unnamed_blocks == 0
    assert {digest for _, digest in chain.held(0, TIER)} == set(expected)


def test_a_waiting_event_whose_blocks_have_all_left_waits_no_more() -> None:
    tokens = tokens_of(3)
    chain = EngineChain()
    chain.stored(stored([2, 3], tokens[SIZE:], parent=1))
    assert chain.removed(0, TIER, [2]) == []
    assert chain.parked_count == 1
    assert chain.removed(0, TIER, [3]) == []
    assert chain.parked_count == 0
    assert run_of(chain.stored(stored([1], tokens[:SIZE]))) == digests_of(tokens)[:1]


def test_a_block_that_left_while_it_waited_is_not_inserted() -> None:
    tokens = tokens_of(3)
    expected = digests_of(tokens)
    chain = EngineChain()
    chain.stored(stored([2, 3], tokens[SIZE:], parent=1))
    chain.removed(0, TIER, [2])
    assert sorted(run_of(chain.stored(stored([1], tokens[:SIZE])))) == sorted(
        [expected[0], expected[2]]
    )


def test_what_waits_is_bounded_by_count_and_by_bytes() -> None:
    for bounds in ({"max_parked": 10}, {"max_parked_bytes": 10 * (8 * SIZE + 200)}):
        chain = EngineChain(**bounds)
        for number in range(30):
            chain.stored(stored([number * 2 + 1], tokens_of(1, number), parent=number * 2))
        assert chain.parked_count == 10
        assert chain.dropped_events == 20
        assert chain.removed(0, TIER, range(1, 61, 2)) == []
        assert chain.parked_count == chain.unnamed_blocks == 0


def test_a_parent_that_has_left_still_names_its_child_while_it_is_remembered() -> None:
    tokens = tokens_of(3)
    chain = EngineChain(max_absent=2)
    chain.stored(stored([1], tokens[:SIZE]))
    chain.removed(0, TIER, [1])
    assert run_of(chain.stored(stored([2], tokens[SIZE : 2 * SIZE], parent=1))) == [
        digests_of(tokens)[1]
    ]
    for number in range(10, 13):
        chain.stored(stored([number], tokens_of(1, number)))
        chain.removed(0, TIER, [number])
    assert chain.stored(stored([9], tokens[SIZE : 2 * SIZE], parent=1)) == []
    assert chain.parked_count == 1


def test_blocks_of_an_adapter_wait_until_it_is_known() -> None:
    tokens = tokens_of(2)
    known: dict[str, LoraIdentity] = {}
    chain = EngineChain(known.get)
    assert chain.stored(stored([1], tokens[:SIZE], lora_name="late")) == []
    assert chain.stored(stored([2], tokens[SIZE:], parent=1, lora_name="late")) == []
    known["late"] = LoraIdentity("late", "/late", "f")
    assert run_of(chain.adapter_known("late")) == digests_of(tokens, RequestIdentity(known["late"]))
    assert chain.adapter_known("late") == []


def test_a_masked_group_names_the_blocks_that_another_group_has_named() -> None:
    tokens = tokens_of(4)
    expected = digests_of(tokens)
    chain = EngineChain()
    assert chain.stored(stored([3, 4], tokens, group=1)) == []
    assert chain.unnamed_blocks == 2
    events = chain.stored(stored([1, 2, 3, 4], tokens))
    masked = [event for event in events if event.fact.group == 1]
    assert run_of(masked) == expected[2:]
    assert run_of(chain.stored(stored([2], tokens[: 2 * SIZE], group=1))) == expected[1:2]
    assert run_of(chain.removed(1, TIER, [3, 4])) == expected[2:]


def test_blocks_of_another_size_than_their_group_are_refused() -> None:
    chain = EngineChain()
    chain.stored(stored([1], tokens_of(1)))
    assert chain.stored(StoredBlocks(0, TIER, [2], 1, [1, 2], 2)) == []
    assert chain.counters.untranslatable == 1
    assert chain.removed(0, TIER, [2]) == []


def test_blocks_beyond_the_bound_are_refused_and_counted() -> None:
    tokens = tokens_of(5)
    chain = EngineChain(max_blocks=3)
    assert run_of(chain.stored(stored(range(5), tokens))) == digests_of(tokens)[:3]
    assert chain.counters.refused_blocks == 2
    chain.removed(0, TIER, range(5))
    assert chain.counters.unknown_removals == 2
    assert chain.held(0, TIER) == []


# ---- any order ----

_CHAINS = {seed: tokens_of(6, seed % 3) for seed in range(4)}  # two of them have equal tokens
_PLACES = st.sampled_from([(0, "Device"), (1, "Device"), (0, "CPU")])
_RANGES = (st.sampled_from(range(4)), st.integers(0, 5), st.integers(1, 3), _PLACES)


class _Naive:
    """A chain beside the copies that it was told of, and what its facts add up to."""

    def __init__(self) -> None:
        self.chain = EngineChain()
        self.copies: dict[tuple[int, str], dict[int, int]] = {}
        self.shown: dict[tuple[int, str], set[bytes]] = {}

    def apply(self, events: Sequence[Insert | Delete]) -> None:
        for event in events:
            blocks = self.shown.setdefault((event.fact.group, event.tier), set())
            for digest in run_of([event]):  # type: ignore[list-item]
                assert (digest in blocks) == isinstance(event, Delete)
                blocks ^= {digest}

    def stored(self, seed: int, first: int, count: int, place: tuple[int, str]) -> None:
        tokens = _CHAINS[seed][first * SIZE : (first + count) * SIZE]
        hashes = [seed * 100 + first + index for index in range(len(tokens) // SIZE)]
        held = self.copies.setdefault(place, {})
        for block in hashes:
            held[block] = held.get(block, 0) + 1
        parent = hashes[0] - 1 if first else None
        self.apply(self.chain.stored(stored(hashes, tokens, parent, *place, is_report=False)))

    def removed(self, seed: int, first: int, count: int, place: tuple[int, str]) -> None:
        hashes = [seed * 100 + first + index for index in range(count)]
        held = self.copies.setdefault(place, {})
        for block in hashes:
            if held.get(block, 0) > 1:
                held[block] -= 1
            else:
                held.pop(block, None)
        self.apply(self.chain.removed(*place, hashes))

    def cleared(self, tier: str) -> None:
        for place, held in self.copies.items():
            if place[1] == tier:
                held.clear()
        self.apply(self.chain.cleared(tier))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("stored"), *_RANGES),
            st.tuples(st.just("removed"), *_RANGES),
            st.tuples(st.just("cleared"), st.sampled_from(["Device", "CPU"])),
        ),
        max_size=40,
    )
)
def test_facts_add_up_to_the_copies_in_any_order(steps: list[Any]) -> None:
    naive = _Naive()
    for name, *values in steps:
        getattr(naive, name)(*values)
    for seed in range(4):  # now every ancestor is told
        naive.stored(seed, 0, 6, (2, "Elsewhere"))
    assert naive.chain.unnamed_blocks == 0
    for place, held in naive.copies.items():
        expected = {digests_of(_CHAINS[block // 100])[block % 100] for block in held}
        assert naive.shown.get(place, set()) == expected
        assert {digest for _, digest in naive.chain.held(*place)} == expected
    for place in list(naive.copies):
        naive.cleared(place[1])
    assert naive.chain.parked_count == 0
    assert not any(naive.shown.values())
