"""What is worth nothing without what has left of another group leaves before all others."""

import pytest
from fakes import ROW_BYTES
from hybrid_world import (
    begin,
    full,
    group_hashes,
    hybrid_manager,
    layout_of,
    look,
    mamba,
    plan,
    store,
    tables_of,
    window,
)

from opal_connector.eviction import POLICIES, LRUPolicy, make_policy
from opal_connector.keys import AttentionLayout
from opal_connector.managers import OpalKVCacheManager, RequestHints, StateBlock, TierRules
from opal_connector.managers.departures import Departures
from opal_connector.managers.records import ObjectKey, ObjectRecord, ObjectState, object_key
from opal_connector.transfers import FailureKind, JobResult

# Blocks of two tokens. A sequence of 16 tokens has two objects of four blocks of full attention,
# and four of two blocks of the window, of which the last two are needed at its end.
WINDOWS = layout_of(full(2), window(4, 2))
STATES = layout_of(full(2), window(4, 2), mamba(2))
CHUNK_TOKENS = 8
FULL, WINDOW, STATE = 0, 1, 2
TOKENS = [100 + token for token in range(16)]
OTHERS = [900 + token for token in range(16)]


def make(*rows: int, layout: AttentionLayout = WINDOWS, **more: object) -> OpalKVCacheManager:
    return hybrid_manager(layout, rows=rows or (64,), chunk_tokens=CHUNK_TOKENS, **more)  # type: ignore[arg-type]


def key_at(manager: OpalKVCacheManager, tokens: list[int], end: int, group: int) -> ObjectKey:
    """The object of a group that ends behind so many tokens."""
    hashes = group_hashes(manager.layout, begin(manager, tokens).chain, group)
    return object_key(hashes[end // manager.layout.groups[group].block_tokens - 1], group)


def given_up(manager: OpalKVCacheManager, tokens: list[int], group: int = WINDOW) -> list[int]:
    """Where the objects of a group end that no length needs."""
    manager.check()
    ends = range(2, len(tokens) + 1, 2)
    return [
        end for end in ends if manager.storage.is_worthless(key_at(manager, tokens, end, group))
    ]


def take_out(manager: OpalKVCacheManager, tokens: list[int], end: int, group: int = FULL) -> None:
    assert manager.storage.remove(key_at(manager, tokens, end, group))


def test_windows_follow_the_chain_that_has_left() -> None:
    """Of the chunk that is gone all of them, of the one before it none."""
    manager = make()
    store(manager, TOKENS)

    take_out(manager, TOKENS, 16)

    assert given_up(manager, TOKENS) == [12, 16]
    assert look(manager, begin(manager, TOKENS)) == 8


def test_chain_does_not_follow_the_windows() -> None:
    """Who goes on from elsewhere needs it, or has the windows on the device."""
    manager = make()
    store(manager, TOKENS)

    for end in (4, 8, 12, 16):
        take_out(manager, TOKENS, end, WINDOW)

    assert given_up(manager, TOKENS, FULL) == []


def test_what_is_given_up_leaves_before_what_is_passing() -> None:
    """The end of a sequence is worth less than the middle of another, once its chain has left."""
    manager = make(32)
    store(manager, OTHERS)
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)

    store(manager, [700, 701, 702, 703, 704, 705, 706, 707])

    tier = manager.storage.tiers[0]
    assert not tier.knows(key_at(manager, TOKENS, 16, WINDOW))
    assert not tier.knows(key_at(manager, TOKENS, 12, WINDOW))
    assert all(tier.knows(key_at(manager, OTHERS, end, WINDOW)) for end in (4, 8, 12, 16))


def test_windows_are_wanted_again_when_the_chain_comes_back() -> None:
    """As soon as its bytes are on their way; and no longer if they do not come."""
    manager = make()
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)
    request = begin(manager, TOKENS)
    job = plan(manager, request)
    assert job is not None
    assert given_up(manager, TOKENS) == []

    manager.commit(JobResult(job.job_id, 0, failed={0: FailureKind.IO}))

    assert given_up(manager, TOKENS) == [12, 16]
    manager.end_request(request)
    store(manager, TOKENS)
    assert given_up(manager, TOKENS) == []
    assert key_at(manager, TOKENS, 16, WINDOW) not in {
        record.key for record in manager.storage.tiers[0].order._unwanted
    }
    assert look(manager, begin(manager, TOKENS)) == 16


def test_part_of_a_chunk_that_another_sequence_holds_keeps_its_windows() -> None:
    """A chunk that begins alike serves lengths up to where they part."""
    manager = make()
    sibling = [*TOKENS[:12], *OTHERS[:4]]
    store(manager, TOKENS)
    store(manager, sibling)

    take_out(manager, TOKENS, 16)

    assert given_up(manager, TOKENS) == [16]
    assert given_up(manager, sibling) == []
    assert look(manager, begin(manager, TOKENS)) == 12


def test_window_that_ends_before_a_length_is_wanted_by_every_continuation() -> None:
    """A state stands every two blocks: what ends half-way serves whatever goes on from there."""
    manager = make(layout=layout_of(full(2), window(4, 2), mamba(4)))
    begun = TOKENS[:10]
    store(manager, TOKENS)
    take_out(manager, TOKENS, 12, WINDOW)
    store(manager, begun)
    assert manager.storage.tiers[0].knows(key_at(manager, begun, 10, WINDOW))
    take_out(manager, TOKENS, 16)
    assert 10 in given_up(manager, TOKENS)

    assert plan(manager, begin(manager, [*begun, *OTHERS[:6]])) is not None

    assert 10 not in given_up(manager, TOKENS)


def test_copy_of_the_chain_in_another_tier_keeps_windows() -> None:
    """Only what no tier has is missing; when the last copy goes, windows of all tiers follow."""
    manager = make(64, 64, rules=[TierRules("off"), TierRules(admission="always")])
    store(manager, TOKENS)
    batch = manager.plan_upkeep()
    for job in batch.copies:
        manager.commit(JobResult(job.job_id, 0))
    near, far = manager.storage.tiers
    chain, end = key_at(manager, TOKENS, 16, FULL), key_at(manager, TOKENS, 16, WINDOW)
    assert far.knows(chain)
    assert far.knows(end)

    near.remove(chain)
    assert given_up(manager, TOKENS) == []
    far.remove(chain)

    assert given_up(manager, TOKENS) == [12, 16]
    for tier in (near, far):
        assert end in {record.key for record in tier.order._unwanted}


def test_what_is_given_up_is_not_moved_to_a_slower_tier() -> None:
    """Bytes that nobody can use are worth no write: they are dropped."""
    rules = [TierRules("off"), TierRules("demote", "always")]
    manager = make(16, 64, rules=rules, evicts_ahead=True)
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)
    near, far = manager.storage.tiers
    near.levels.want(6 * ROW_BYTES)  # of which four rows are free

    batch = manager.plan_upkeep()

    assert not near.knows(key_at(manager, TOKENS, 16, WINDOW))
    assert not far.knows(key_at(manager, TOKENS, 16, WINDOW))
    assert not batch.copies
    manager.check()


def test_state_follows_the_window_at_its_length() -> None:
    """It serves one length, which needs the window's end; other windows are not its business."""
    manager = make(layout=STATES)
    request = begin(manager, TOKENS)
    tables = tables_of(manager, 16)
    states = [StateBlock(2, 9, 8), StateBlock(2, 17, 16)]
    job = manager.plan_store(
        request, full_blocks=8, tables=tables, include_tail=True, states=states
    )
    assert job is not None
    manager.commit(JobResult(job.job_id, 0))
    manager.end_request(request)

    take_out(manager, TOKENS, 16, WINDOW)

    assert given_up(manager, TOKENS, STATE) == [16]
    assert look(manager, begin(manager, TOKENS)) == 8
    take_out(manager, TOKENS, 16)
    assert given_up(manager, TOKENS, STATE) == [16]
    assert given_up(manager, TOKENS, WINDOW) == [12]


def end_with(manager: OpalKVCacheManager, hints: RequestHints) -> None:
    """A request over the sequence that stores nothing, and says something at its end."""
    request = manager.new_request("hints", hints=hints)
    request.extend(TOKENS)
    manager.end_request(request)


@pytest.mark.parametrize("is_given_up_first", [False, True])
def test_end_of_a_session_is_not_forgotten_when_its_chain_comes_back(
    *, is_given_up_first: bool
) -> None:
    """The chain makes the windows usable, and expected by nobody still."""
    manager = make()
    store(manager, TOKENS)
    if is_given_up_first:
        take_out(manager, TOKENS, 16)
    end_with(manager, RequestHints(session="ends"))
    if not is_given_up_first:
        take_out(manager, TOKENS, 16)
    order = manager.storage.tiers[0].order

    assert plan(manager, begin(manager, TOKENS)) is not None

    assert given_up(manager, TOKENS) == []
    ends = {key_at(manager, TOKENS, end, WINDOW) for end in (12, 16)}
    assert ends <= {record.key for record in order.next_victims(16)}
    assert ends <= {record.key for record in order._unwanted}


def test_what_should_stay_is_not_dropped_where_others_are_moved() -> None:
    """A tier that is demoted from asks for its first victims: what is kept is none of them."""
    rules = [TierRules("off"), TierRules("demote", "always")]
    manager = make(16, 64, rules=rules, evicts_ahead=True)
    store(manager, TOKENS)
    end_with(manager, RequestHints(keep=True))
    take_out(manager, TOKENS, 16)
    near = manager.storage.tiers[0]
    near.levels.want(6 * ROW_BYTES)  # of which four rows are free

    manager.plan_upkeep()

    assert given_up(manager, TOKENS) == [12, 16]
    assert near.knows(key_at(manager, TOKENS, 16, WINDOW))
    assert near.knows(key_at(manager, TOKENS, 12, WINDOW))


def test_chain_that_is_given_up_leaves_in_one_look_per_object(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its end was given up first and leaves first: nobody has to pass those before it."""
    looks: list[ObjectKey] = []
    may_leave = Departures.may_leave

    def look_at(order: Departures, record: ObjectRecord) -> bool:
        looks.append(record.key)
        return may_leave(order, record)

    manager = make(1024, layout=layout_of(full(2, is_draft=True), full(2)))
    tokens = list(range(800))
    store(manager, tokens)
    count = len(tokens) // CHUNK_TOKENS
    for end in range(len(tokens), 0, -CHUNK_TOKENS):
        take_out(manager, tokens, end, group=0)
    order = manager.storage.tiers[0].order
    monkeypatch.setattr(Departures, "may_leave", look_at)

    victims = order.evict(count * 4 * ROW_BYTES) or []

    ends = range(len(tokens), 0, -CHUNK_TOKENS)
    assert [record.key for record in victims] == [key_at(manager, tokens, end, 1) for end in ends]
    assert len(looks) <= 3 * count


def test_two_chains_leave_together() -> None:
    """A draft model's chain and the model's own: neither is worth anything alone."""
    manager = make(layout=layout_of(full(2, is_draft=True), full(2)))
    store(manager, TOKENS)

    take_out(manager, TOKENS, 16, group=1)

    # The draft's block at the start of the chunk proves what ends before it.
    assert given_up(manager, TOKENS, 0) == []
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16, group=0)
    assert given_up(manager, TOKENS, 1) == [16]


def test_chain_whose_bytes_are_wrong_takes_its_windows_along() -> None:
    """What is found damaged has left, until it is stored anew."""
    manager = make()
    store(manager, TOKENS)
    record = manager.storage.tiers[0].get(key_at(manager, TOKENS, 16, FULL))
    assert record is not None

    manager.storage.tiers[0].quarantine(record)

    assert record.state is ObjectState.QUARANTINED
    assert given_up(manager, TOKENS) == [12, 16]


def test_window_that_somebody_loads_stays_until_it_has() -> None:
    """A promise counts more than what is worth something to others."""
    manager = make(16)
    store(manager, TOKENS)
    reader = begin(manager, TOKENS, "reader")
    assert look(manager, reader) == 16
    take_out(manager, TOKENS, 16)
    end = key_at(manager, TOKENS, 16, WINDOW)

    store(manager, OTHERS)
    assert manager.storage.tiers[0].knows(end)
    manager.release(reader)
    store(manager, OTHERS)

    assert not manager.storage.tiers[0].knows(end)
    manager.end_request(reader)
    manager.check()


def test_reset_forgets_what_was_given_up() -> None:
    """And what comes after it is followed as before."""
    manager = make()
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)

    manager.reset()

    assert given_up(manager, TOKENS) == []
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)
    assert given_up(manager, TOKENS) == [12, 16]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_eviction_that_is_undone_brings_back_what_was_given_up(policy: str) -> None:
    """All or nothing: what was given up, what is passing and what is neither are there again."""
    manager = make(policy=lambda: make_policy(policy))
    store(manager, OTHERS)
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)
    tier = manager.storage.tiers[0]
    before = [record.key for record in tier.order.next_victims(4)]

    assert tier.order.evict(tier.used_bytes + 1) is None

    assert given_up(manager, TOKENS) == [12, 16]
    assert [record.key for record in tier.order.next_victims(4)] == before
    victims = tier.order.evict(4 * ROW_BYTES, limit=2) or []
    assert {record.key for record in victims} == {
        key_at(manager, TOKENS, end, WINDOW) for end in (12, 16)
    }
    tier.order.take_back(victims)
    manager.check()


def test_what_was_given_up_is_remembered_as_its_chain_is() -> None:
    """Or it would come back as something new, and leave before the chain that needs it."""
    expelled: list[ObjectKey] = []

    class Remembering(LRUPolicy):
        def expel(self, key: ObjectKey) -> None:
            expelled.append(key)
            super().expel(key)

    manager = make(32, policy=Remembering)
    store(manager, OTHERS)
    store(manager, TOKENS)
    take_out(manager, TOKENS, 16)

    store(manager, [700 + token for token in range(16)])

    ends = [key_at(manager, TOKENS, end, WINDOW) for end in (12, 16)]
    assert sorted(expelled) == sorted(ends)


@pytest.mark.parametrize("layout", [layout_of(full(2)), layout_of(window(4, 2))])
def test_one_group_has_no_ties(layout: AttentionLayout) -> None:
    """Nothing is followed where there is nothing to follow."""
    manager = make(layout=layout)
    store(manager, TOKENS)

    take_out(manager, TOKENS, 16, group=0)

    assert not manager.storage.ties
    assert given_up(manager, TOKENS, 0) == []
