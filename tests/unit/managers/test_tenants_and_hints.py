"""Who pays for room, who leaves last, and what leaves for its age."""

from collections.abc import Sequence
from typing import Any

import pytest
from fakes import BLOCK_TOKENS, ROW_BYTES, FakeClock, done, plan, replay, tokens_of

from opal_connector.config import load_config
from opal_connector.events import EventLog
from opal_connector.keys import RequestIdentity, plain_layout
from opal_connector.managers import (
    NO_HINTS,
    OpalKVCacheManager,
    OpalRequest,
    RequestHints,
    TierPool,
    build_manager,
)

_RANGES = 100  # block numbers of one sequence


def make(
    rows: int, clock: FakeClock | None = None, *, ttl: float | None = None, **config: Any
) -> OpalKVCacheManager:
    """Books over one tier of memory, with chunks of one block."""
    settings = load_config({"CPUMemory": {"ttl_seconds": ttl}, **config})
    return build_manager(
        settings,
        layout=plain_layout(BLOCK_TOKENS),
        chunk_blocks=1,
        spaces={"CPUMemory": TierPool(capacity_rows=rows, row_bytes=ROW_BYTES)},
        log=EventLog(enabled=True),
        clock=clock or FakeClock(),
    )


def serve(
    manager: OpalKVCacheManager,
    sequence: int,
    blocks: int,
    *,
    salt: str | None = None,
    hints: RequestHints = NO_HINTS,
) -> OpalRequest:
    """A request over `blocks` blocks of a sequence of its own, stored and ended."""
    identity = RequestIdentity(cache_salt=salt)
    request = manager.new_request(f"r{sequence}", identity, hints=hints)
    first = sequence * _RANGES
    request.extend(tokens_of(range(first, first + blocks)))
    job = plan(manager, request)
    if job is not None:
        manager.commit(done(job))
    manager.end_request(request)
    manager.check()
    return request


def held(manager: OpalKVCacheManager, requests: Sequence[OpalRequest]) -> list[int]:
    """How many blocks of each request are there from its first on."""
    tier = manager.storage.tiers[0]
    group = (0).to_bytes(2, "little")
    return [
        tier.batched_contains([block_hash + group for block_hash in request.chain.hashes])  # type: ignore[misc]
        for request in requests
    ]


# Quotas.


def test_tenant_at_his_share_evicts_what_is_his() -> None:
    """A flood of one tenant takes nothing from the others."""
    manager = make(10, quotas={"flood": 0.4})
    calm = [serve(manager, number, 2, salt="calm") for number in range(3)]

    flood = [serve(manager, 10 + number, 2, salt="flood") for number in range(20)]

    assert held(manager, calm) == [2, 2, 2]
    assert held(manager, flood) == [*[0] * 18, 2, 2]


def test_full_tier_takes_from_who_uses_most_of_his_share() -> None:
    """Shares may sum to more than the tier: then the one who is nearest his share pays."""
    manager = make(8, quotas={"small": 0.5, "large": 1.0})
    small = serve(manager, 0, 4, salt="small")
    large = serve(manager, 1, 4, salt="large")

    third = serve(manager, 2, 1, salt="large")

    assert held(manager, [small, large, third]) == [3, 4, 1]


def test_star_is_for_every_other_salt() -> None:
    """Tenants that are not named have a share each; requests without a salt have none."""
    manager = make(10, quotas={"*": 0.2})
    a = [serve(manager, number, 1, salt="a") for number in range(4)]
    b = [serve(manager, 10 + number, 1, salt="b") for number in range(4)]
    plain = [serve(manager, 20 + number, 1) for number in range(6)]

    assert (held(manager, a), held(manager, b)) == ([0, 0, 1, 1], [0, 0, 1, 1])
    assert held(manager, plain) == [1] * 6


def test_object_larger_than_its_share_evicts_nothing() -> None:
    """What cannot fit is refused, and nobody pays for it; the head of it is kept."""
    manager = make(10, quotas={"a": 0.3})

    request = serve(manager, 0, 5, salt="a")

    assert held(manager, [request]) == [3]


# Hints.


def test_kept_chain_leaves_last() -> None:
    """It is the oldest, and stays while there is anything else to evict."""
    manager = make(4)
    kept = serve(manager, 0, 2, hints=RequestHints(keep=True))
    others = [serve(manager, 1 + number, 1) for number in range(5)]

    assert held(manager, [kept]) == [2]
    assert held(manager, others) == [0, 0, 0, 1, 1]


def test_what_is_kept_gives_way_when_there_is_nothing_else() -> None:
    """A hint is a wish: a tier that is full of wishes still works, tails first."""
    manager = make(2)
    kept = serve(manager, 0, 2, hints=RequestHints(keep=True))

    other = serve(manager, 1, 1)

    assert held(manager, [kept, other]) == [1, 1]


def test_keeping_ends() -> None:
    """After its time a kept chain is an old one."""
    clock = FakeClock()
    manager = make(3, clock)
    kept = serve(manager, 0, 2, hints=RequestHints(keep=60.0))
    clock.now += 61
    manager.expire(clock.now)
    serve(manager, 1, 1)

    serve(manager, 2, 1)

    assert held(manager, [kept]) == [1]


def test_dropped_request_leaves_nothing() -> None:
    """What the client calls worthless takes nobody's place."""
    manager = make(4)

    assert held(manager, [serve(manager, 0, 2, hints=RequestHints(drop=True))]) == [0]


def chain(manager: OpalKVCacheManager, blocks: Sequence[int], **hints: Any) -> OpalRequest:
    """A request over these very blocks, stored and ended."""
    request = manager.new_request("r", hints=RequestHints(**hints) if hints else NO_HINTS)
    request.extend(tokens_of(blocks))
    job = plan(manager, request)
    if job is not None:
        manager.commit(done(job))
    manager.end_request(request)
    manager.check()
    return request


def test_session_that_ends_makes_room_first() -> None:
    """What only it has goes before older things; what it shares with others does not."""
    manager = make(8)
    old = serve(manager, 0, 2)
    other = chain(manager, [900, 901, 910])
    ended = chain(manager, [900, 901, 920, 921], session="ends")

    fresh = [serve(manager, 2 + number, 1) for number in range(3)]

    assert held(manager, [old, other, ended]) == [2, 3, 2]
    assert held(manager, fresh) == [1, 1, 1]


def test_session_that_was_not_over_is_like_others_again() -> None:
    """A hint may be wrong: the next use takes it back."""
    manager = make(3)
    older = serve(manager, 1, 1)
    ended = chain(manager, [900, 901], session="ends")
    chain(manager, [900, 901])

    serve(manager, 2, 1)

    assert held(manager, [ended, older]) == [2, 0]


def test_refused_store_takes_nothing_of_an_ended_session() -> None:
    """What was chosen to go stays if not enough can go."""
    manager = make(4)
    ended = chain(manager, [900, 901], session="ends")
    reader = manager.new_request("reader")
    reader.extend(tokens_of([900]))
    manager.lookup(reader, computed_blocks=0, max_blocks=1, now=0.0)

    large = manager.new_request("large")
    large.extend(tokens_of(range(100, 106)))
    job = plan(manager, large)

    manager.check()
    assert job is not None
    assert held(manager, [ended]) == [1], "only what nobody relies on made room"


# Age.


def test_unused_objects_leave_after_their_time() -> None:
    """With one DELETE each, tails before heads; what was used meanwhile stays."""
    clock = FakeClock()
    manager = make(8, clock, ttl=100)
    old, used = serve(manager, 0, 3), serve(manager, 1, 2)
    clock.now += 60
    serve(manager, 1, 2)
    clock.now += 60

    for _ in range(4):  # a head is due again a moment after its tail has left
        manager.expire(clock.now)
        clock.now += 2
    manager.check()

    assert held(manager, [old, used]) == [0, 2]
    assert len(replay({}, manager.take_events())) == 2


def test_life_of_a_request_is_its_own() -> None:
    """Where nothing else expires, what a request limits does."""
    clock = FakeClock()
    manager = make(8, clock)
    short, other = serve(manager, 0, 1, hints=RequestHints(ttl=10.0)), serve(manager, 1, 1)
    clock.now += 11

    manager.expire(clock.now)

    assert held(manager, [short, other]) == [0, 1]


def test_leased_object_outlives_its_time() -> None:
    """What was promised stays until it is loaded."""
    clock = FakeClock()
    manager = make(8, clock, ttl=10)
    stored = serve(manager, 0, 1)
    request = manager.new_request("reader")
    request.extend(tokens_of([0]))
    result = manager.lookup(request, computed_blocks=0, max_blocks=1, now=clock.now)
    clock.now += 11
    manager.expire(clock.now)
    assert (result.block_count, held(manager, [stored])) == (1, [1])

    manager.release(request)
    clock.now += 2
    manager.expire(clock.now)

    assert held(manager, [stored]) == [0]


@pytest.mark.parametrize(("keep", "seconds"), [(True, 1800.0), (False, 0.0), (7, 7.0), (-1, 0.0)])
def test_keep_is_a_yes_or_seconds(keep: float, seconds: float) -> None:
    """The two ways to write it."""
    assert RequestHints(keep=keep).keep_seconds == seconds
