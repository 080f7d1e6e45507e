"""Policies: what each looks at, and what it does when all are equal."""

from collections import Counter

import pytest

from opal_connector.cluster.loads import WorkerLoad
from opal_connector.cluster.policies import (
    POLICY_NAMES,
    Balanced,
    BalancedSettings,
    Candidate,
    make_policy,
)
from opal_connector.cluster.request import WorkerMatch


def candidates(*names: str) -> list[Candidate]:
    return [Candidate(name, prefill_tokens_per_second=1_000.0) for name in names]


def with_match(name: str, tokens: int, **tiers: int) -> Candidate:
    """`tokens` on the device and, behind them, those of the tiers."""
    match = WorkerMatch(tokens + sum(tiers.values()), tokens, tiers)
    return Candidate(
        name,
        match,
        prefill_tokens_per_second=1_000.0,
        fetch_seconds_per_token={"CPUMemory": 1e-5, "Slow": 1.0},
    )


@pytest.mark.parametrize("name", [*POLICY_NAMES, "balanced", "MAXPREFIX"])
def test_every_name_makes_a_policy_that_chooses_among_the_candidates(name: str) -> None:
    policy = make_policy(name, seed=1)
    assert policy.choose(100, candidates("a", "b")).worker_id in {"a", "b"}
    assert policy.choose(100, candidates("c")).worker_id == "c"


def test_an_unknown_name_says_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="'Sticky', allowed are RoundRobin, LeastLoaded"):
        make_policy("Sticky")


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_at_idle_and_without_any_prefix_no_worker_is_a_favourite(name: str) -> None:
    policy = make_policy(name, seed=3)
    chosen = Counter(policy.choose(100, candidates("a", "b", "c")).worker_id for _ in range(300))
    assert min(chosen.values()) > 60


def test_round_robin_goes_on_in_turn_when_workers_come_and_go() -> None:
    policy = make_policy("RoundRobin")
    turns = [policy.choose(1, candidates("b", "a", "c")).worker_id for _ in range(4)]
    assert turns == ["a", "b", "c", "a"]
    assert policy.choose(1, candidates("c", "a")).worker_id == "c"
    assert policy.choose(1, candidates("c", "d", "a")).worker_id == "d"
    assert policy.choose(1, candidates("c", "d", "a")).worker_id == "a"


def test_least_loaded_counts_requests_under_way() -> None:
    busy = [Candidate("a", load=WorkerLoad(2)), Candidate("b", load=WorkerLoad(1))]
    assert make_policy("LeastLoaded").choose(1, busy).worker_id == "b"


def test_max_prefix_takes_the_longest_match_and_draws_among_equals() -> None:
    policy = make_policy("MaxPrefix", seed=2)
    some = [with_match("a", 10), with_match("b", 20), with_match("c", 5, CPUMemory=15)]
    chosen = {policy.choose(100, some).worker_id for _ in range(50)}
    assert chosen == {"b", "c"}


def test_more_on_the_host_beats_less_on_the_device_when_fetching_is_fast_and_only_then() -> None:
    device = with_match("device", 300)
    host = with_match("host", 0, CPUMemory=400)
    slow = with_match("slow", 0, Slow=400)
    policy = Balanced()
    assert policy.choose(1_000, [device, host]).worker_id == "host"
    assert policy.choose(1_000, [device, slow]).worker_id == "device"


def test_a_segment_that_is_dearer_to_fetch_than_to_compute_costs_its_computing() -> None:
    costs = Balanced().costs(1_000, [with_match("a", 100, CPUMemory=200, Slow=300)])
    assert costs["a"].compute_seconds == pytest.approx(0.7)
    assert costs["a"].fetch_seconds == pytest.approx(0.002)


def test_the_owner_of_a_prefix_is_passed_over_when_its_queue_costs_more_than_the_prefix_saves() -> (
    None
):
    owner = with_match("owner", 900)
    busy = Candidate(
        "owner", owner.match, WorkerLoad(9, queued_tokens=8_000), prefill_tokens_per_second=1_000.0
    )
    idle = with_match("idle", 0)
    policy = Balanced()
    assert policy.choose(1_000, [owner, idle]).worker_id == "owner"
    assert policy.choose(1_000, [busy, idle]).worker_id == "idle"


def test_a_new_worker_gets_work_although_the_others_have_had_more_of_the_prefixes() -> None:
    policy = Balanced(seed=1)
    olds = [
        Candidate(
            name,
            WorkerMatch(100, 100),
            WorkerLoad(recent_tokens=50_000.0),
            prefill_tokens_per_second=1_000.0,
        )
        for name in ("a", "b", "c")
    ]
    assert policy.choose(1_000, [*olds, with_match("new", 0)]).worker_id == "new"


def test_a_device_about_to_preempt_is_avoided() -> None:
    load = WorkerLoad(3, decoding_tokens=3_000)
    full, free = (
        Candidate(name, WorkerMatch(match, match), load, 1_000.0, device_usage=usage)
        for name, match, usage in (("full", 100, 0.99), ("free", 0, 0.5))
    )
    assert Balanced().choose(1_000, [full, free]).worker_id == "free"


def test_temperature_spreads_the_choice_the_cheaper_the_likelier() -> None:
    policy = Balanced(BalancedSettings(temperature=0.3), seed=1)
    some = [with_match("good", 800), with_match("bad", 0)]
    chosen = Counter(policy.choose(1_000, some).worker_id for _ in range(400))
    assert chosen["good"] > chosen["bad"] > 0


def test_speeds_that_nobody_has_measured_yet_do_not_stop_it_and_costs_are_explained() -> None:
    choice = Balanced().choose(1_000, [Candidate("a"), Candidate("b", WorkerMatch(500, 500))])
    assert choice.worker_id == "b"
    assert choice.costs["b"].compute_seconds == pytest.approx(500 / 2_000)
    assert choice.costs["a"].compute_seconds == pytest.approx(1_000 / 2_000)
