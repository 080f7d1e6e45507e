"""What the router keeps for its page: right, bounded, and by where the tokens came from."""

import random
from collections.abc import Callable

import pytest

from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.router import dashboard_rings
from opal_connector.cluster.router.dashboard_rings import (
    CANCELLED,
    KEPT_REQUESTS,
    SLOT_COUNT,
    SLOT_SECONDS,
    TIERS_LIMIT,
    RecentRequests,
    SentRequest,
    Slot,
    Times,
    TokenSums,
)
from opal_connector.cluster.router.decide import RouteDecision


class Clock:
    """A time that only the test moves."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(dashboard_rings, "time", made)
    return made


def decision(prompt_tokens: int = 100, match: WorkerMatch | None = None) -> RouteDecision:
    match = match or WorkerMatch(0, 0)
    return RouteDecision(
        worker_id="one",
        reason="Balanced",
        prompt_tokens=prompt_tokens,
        expected_tokens=match.total_tokens,
        matches={"one": match, "two": WorkerMatch(0, 0)},
        prefixes=("of", "this", "only", "that", "it", "is", "there"),  # type: ignore[arg-type]
    )


def serve(
    recent: RecentRequests,
    decided: RouteDecision,
    cached: int | None,
    *,
    status: int = 200,
    failure: str | None = None,
    seconds: float = 0.01,
) -> SentRequest:
    sent = recent.begin(decided, 1)
    if status:
        recent.first_byte(sent, status, seconds)
    sent.cached_tokens, sent.failure = cached, failure
    recent.end(sent, status)
    return sent


def test_tokens_are_counted_where_the_index_saw_them_as_far_as_the_engine_had_them() -> None:
    """The device first, then tiers; what was missing is computed, what was more is unforeseen."""
    match = WorkerMatch(80, 32, {"CPUMemory": 32, "LocalNVMe": 16})
    for cached, wanted in (
        (80, TokenSums(32, {"CPUMemory": 32, "LocalNVMe": 16}, 0, 20)),
        (48, TokenSums(32, {"CPUMemory": 16, "LocalNVMe": 0}, 0, 52)),
        (96, TokenSums(32, {"CPUMemory": 32, "LocalNVMe": 16}, 16, 4)),
        (0, TokenSums(0, {"CPUMemory": 0, "LocalNVMe": 0}, 0, 100)),
        (999, TokenSums(32, {"CPUMemory": 32, "LocalNVMe": 16}, 20, 0)),
    ):
        recent = RecentRequests()
        serve(recent, decision(100, match), cached)
        assert recent.total().tokens == wanted, cached


def test_a_request_whose_engine_does_not_say_is_in_no_sum_of_tokens() -> None:
    recent = RecentRequests()
    serve(recent, decision(), None)
    total = recent.total()
    assert (total.requests, total.uncounted, total.tokens) == (1, 1, TokenSums())


@pytest.mark.parametrize(
    ("status", "failure", "faults"),
    [(200, None, 0), (404, None, 0), (503, None, 1), (0, "refused", 1), (200, CANCELLED, 0)],
)
def test_only_what_an_instance_did_wrong_is_a_fault(
    status: int, failure: str | None, faults: int
) -> None:
    recent = RecentRequests()
    sent = serve(recent, decision(), None, status=status, failure=failure)
    assert (recent.total().faults, sent.is_over, sent.status) == (faults, True, status)


def test_what_is_kept_is_bounded_and_the_sums_since_the_start_lose_nothing(clock: Clock) -> None:
    recent = RecentRequests()
    for _ in range(3 * SLOT_COUNT):
        for _ in range(3):
            serve(recent, decision(100, WorkerMatch(64, 64)), 64)
        clock.now += SLOT_SECONDS
    assert len(recent.slots) == SLOT_COUNT
    assert len(recent.requests) == KEPT_REQUESTS
    assert recent.requests[-1].number == 9 * SLOT_COUNT
    total = recent.total()
    assert total.requests == 9 * SLOT_COUNT
    assert total.tokens == TokenSums(device=64 * total.requests, computed=36 * total.requests)
    assert total.first_bytes.percentiles()[-1] == pytest.approx(0.01, rel=0.04)


def test_the_last_minute_is_the_last_minute(clock: Clock) -> None:
    recent = RecentRequests()
    serve(recent, decision(), None)
    clock.now += 90
    for _ in range(2):
        serve(recent, decision(), None)
        clock.now += 20
    assert recent.last(60, clock.now).requests == 2
    assert recent.last(300, clock.now).requests == 3
    assert recent.last(60, clock.now + 300).requests == 0


def test_names_of_tiers_that_an_instance_makes_up_do_not_fill_the_memory() -> None:
    sums, whole = TokenSums(), Slot()
    recent = RecentRequests()
    for number in range(10 * TIERS_LIMIT):
        match = WorkerMatch(10, 0, {f"tier {number}": 10})
        sums.see(recent.begin(decision(10, match), 1), 10)
    whole.tokens.add(sums)
    for found in (sums, whole.tokens):
        assert len(found.tiers) <= TIERS_LIMIT + 1
        assert sum(found.tiers.values()) == 100 * TIERS_LIMIT


@pytest.mark.parametrize(
    "draw",
    [lambda rng: rng.lognormvariate(-3, 2), lambda rng: rng.uniform(0, 2), lambda _: 0.25],
)
def test_percentiles_are_those_of_the_values_to_a_few_percent(
    draw: Callable[[random.Random], float],
) -> None:
    rng = random.Random(1)
    values = [draw(rng) for _ in range(5_000)]
    times, other = Times(), Times()
    for place, value in enumerate(values):
        (times if place % 2 else other).see(value)
    times.add(other)
    values.sort()
    exact = [values[len(values) * percent // 100 - 1] for percent in (50, 90, 99)]
    assert times.percentiles() == pytest.approx(exact, rel=0.03)


def test_no_time_and_impossible_times_do_not_break_the_percentiles() -> None:
    times = Times()
    assert times.percentiles() == (None, None, None)
    times.see(0.0)
    times.see(-1.0)
    assert times.percentiles() == pytest.approx((1e-6,) * 3, rel=0.04)
    times.see(1.0)
    assert times.percentiles()[-1] == pytest.approx(1.0, rel=0.04)
