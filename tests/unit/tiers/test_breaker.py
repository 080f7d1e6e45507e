"""When a tier is left alone, and when it is asked again."""

import random

import pytest

from opal_connector.tiers.breaker import BreakerLimits, CircuitBreaker, ProbeOutcome
from opal_connector.transfers import TierHealth

LIMITS = BreakerLimits(
    errors_in_a_row=3,
    slow_seconds=1.0,
    slow_in_a_row=2,
    first_wait_seconds=1.0,
    longest_wait_seconds=4.0,
)


@pytest.fixture
def breaker() -> CircuitBreaker:
    return CircuitBreaker(LIMITS)


def fail(breaker: CircuitBreaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.failed(now=now)


def work(breaker: CircuitBreaker, seconds: float = 0.1, now: float = 0.0) -> None:
    breaker.succeeded(seconds=seconds, is_store=True, now=now)


def first_probe(breaker: CircuitBreaker, now: float) -> float:
    """The time at which a probe is due first, to a tenth of a second."""
    ticks = next(tick for tick in range(1000) if breaker.begin_probe(now=now + tick / 10))
    return now + ticks / 10


def test_errors_in_a_row_suspend_the_tier(breaker: CircuitBreaker) -> None:
    """One short of the limit is not enough."""
    fail(breaker, 2)
    assert breaker.health is TierHealth.OK
    assert breaker.takes_loads
    assert breaker.takes_stores

    fail(breaker, 1)

    assert breaker.health is TierHealth.SUSPENDED
    assert not breaker.takes_loads
    assert not breaker.takes_stores


def test_errors_with_successes_between_do_not_suspend(breaker: CircuitBreaker) -> None:
    """A medium that mostly works is used."""
    for _ in range(10):
        fail(breaker, 2)
        work(breaker)

    assert breaker.health is TierHealth.OK


def test_ht_64_slow_operations_suspend_although_they_succeed(breaker: CircuitBreaker) -> None:
    """A server that accepts and crawls trips the breaker by latency."""
    work(breaker, seconds=1.5)
    work(breaker, seconds=1.0)  # not slow
    work(breaker, seconds=1.5)
    assert breaker.health is TierHealth.OK

    work(breaker, seconds=1.5)

    assert breaker.health is TierHealth.SUSPENDED


def test_ht_64_one_hang_suspends_at_once(breaker: CircuitBreaker) -> None:
    """Nobody waits for a second operation that does not answer."""
    breaker.hung(now=0.0)

    assert breaker.health is TierHealth.SUSPENDED


def test_late_success_does_not_close_the_circuit(breaker: CircuitBreaker) -> None:
    """What began before the medium failed says nothing about it now."""
    fail(breaker, 3)

    work(breaker, now=0.5)

    assert breaker.health is TierHealth.SUSPENDED


def test_late_errors_do_not_put_the_probe_off(breaker: CircuitBreaker) -> None:
    """A hundred operations that were under way end with errors: the wait is the same."""
    fail(breaker, 3)
    fail(breaker, 100, now=0.5)
    breaker.hung(now=0.9)

    assert first_probe(breaker, 0.0) == 1.0


def test_one_probe_at_a_time(breaker: CircuitBreaker) -> None:
    """Two threads that ask are not both sent."""
    fail(breaker, 3)

    assert [breaker.begin_probe(now=1.0) for _ in range(3)] == [True, False, False]


def test_successful_probe_closes_the_circuit(breaker: CircuitBreaker) -> None:
    """All is as at the start, the count of errors too."""
    fail(breaker, 3)
    assert breaker.begin_probe(now=1.0)
    assert breaker.health is TierHealth.SUSPENDED

    breaker.end_probe(ProbeOutcome.OK, now=1.1)

    assert breaker.health is TierHealth.OK
    fail(breaker, 2, now=1.2)
    assert breaker.health is TierHealth.OK


def test_waits_double_up_to_the_bound(breaker: CircuitBreaker) -> None:
    """1, 2, 4, 4, 4 seconds."""
    fail(breaker, 3)
    now, waits = 0.0, []
    for _ in range(5):
        due = first_probe(breaker, now)
        waits.append(round(due - now, 1))
        now = due
        breaker.end_probe(ProbeOutcome.FAILED, now=now)

    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_medium_that_only_answers_probes_is_left_alone_longer(breaker: CircuitBreaker) -> None:
    """The wait is short again after real work only."""
    fail(breaker, 3)
    assert breaker.begin_probe(now=1.0)
    breaker.end_probe(ProbeOutcome.OK, now=1.0)
    fail(breaker, 3, now=1.0)
    assert first_probe(breaker, 1.0) == 3.0
    breaker.end_probe(ProbeOutcome.OK, now=3.0)

    work(breaker, now=3.0)
    fail(breaker, 3, now=3.0)

    assert first_probe(breaker, 3.0) == 4.0


def test_ht_59_full_medium_sheds_stores_and_goes_on_loading(breaker: CircuitBreaker) -> None:
    """ENOSPC is no fault of reads, and is a state of its own."""
    breaker.ran_out_of_space(now=0.0)

    assert breaker.health is TierHealth.NO_SPACE
    assert breaker.takes_loads
    assert not breaker.takes_stores


def test_ht_59_space_returns(breaker: CircuitBreaker) -> None:
    """After a wait a probe finds out; while it is full the waits grow."""
    breaker.ran_out_of_space(now=0.0)
    breaker.ran_out_of_space(now=0.5)  # another store that was under way: no longer wait
    assert first_probe(breaker, 0.0) == 1.0
    breaker.end_probe(ProbeOutcome.NO_SPACE, now=1.0)
    assert breaker.health is TierHealth.NO_SPACE
    assert first_probe(breaker, 1.0) == 3.0

    breaker.end_probe(ProbeOutcome.OK, now=3.0)

    assert breaker.health is TierHealth.OK
    assert breaker.takes_stores


def test_room_for_the_probe_only_makes_waits_grow(breaker: CircuitBreaker) -> None:
    """A small file fits, an object does not: until a store succeeds the waits do not shrink."""
    breaker.ran_out_of_space(now=0.0)
    assert breaker.begin_probe(now=1.0)
    breaker.end_probe(ProbeOutcome.OK, now=1.0)
    breaker.succeeded(seconds=0.1, is_store=False, now=1.0)  # a load shows nothing about space

    breaker.ran_out_of_space(now=1.0)
    assert first_probe(breaker, 1.0) == 3.0
    breaker.end_probe(ProbeOutcome.OK, now=3.0)
    work(breaker, now=3.0)
    breaker.ran_out_of_space(now=3.0)

    assert first_probe(breaker, 3.0) == 4.0


def test_running_out_of_space_is_no_error(breaker: CircuitBreaker) -> None:
    """Full again and again never suspends loads."""
    for _ in range(10):
        breaker.failed(now=0.0)
        breaker.ran_out_of_space(now=0.0)

    assert breaker.health is TierHealth.NO_SPACE


def test_suspended_and_full_recovers_in_both(breaker: CircuitBreaker) -> None:
    """One probe answers for both states."""
    breaker.ran_out_of_space(now=0.0)
    breaker.hung(now=0.0)
    assert breaker.health is TierHealth.SUSPENDED
    assert breaker.begin_probe(now=1.0)

    breaker.end_probe(ProbeOutcome.NO_SPACE, now=1.0)
    assert breaker.health is TierHealth.NO_SPACE
    assert first_probe(breaker, 1.0) == 3.0
    breaker.end_probe(ProbeOutcome.OK, now=3.0)

    assert breaker.health is TierHealth.OK


def test_healthy_tier_is_never_probed(breaker: CircuitBreaker) -> None:
    """A probe costs an I/O thread."""
    work(breaker)

    assert not breaker.begin_probe(now=1e9)


def test_any_history_ends_healthy_when_probes_succeed() -> None:
    """Whatever happened, a tier that works comes back within the longest wait."""
    random_source = random.Random(1)
    for _ in range(200):
        breaker, now = CircuitBreaker(LIMITS), 0.0
        for _ in range(random_source.randrange(40)):
            now += random_source.random() * 2
            match random_source.randrange(6):
                case 0:
                    breaker.failed(now=now)
                case 1:
                    breaker.hung(now=now)
                case 2:
                    breaker.ran_out_of_space(now=now)
                case 3:
                    work(breaker, seconds=random_source.choice([0.1, 1.5]), now=now)
                case _:
                    if breaker.begin_probe(now=now):
                        breaker.end_probe(random_source.choice(list(ProbeOutcome)), now=now)
            assert breaker.takes_loads or not breaker.takes_stores
        now += LIMITS.longest_wait_seconds
        if breaker.begin_probe(now=now):
            breaker.end_probe(ProbeOutcome.OK, now=now)

        assert breaker.health is TierHealth.OK
