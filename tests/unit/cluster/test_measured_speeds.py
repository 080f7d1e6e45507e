"""Speeds that workers measure: real differences count, and a bad moment costs nobody its work."""

import random

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.loads import LoadBook, WorkerLoad
from opal_connector.cluster.policies import Balanced, Candidate
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.router.decide import Router

MUCH = WorkerLoad(recent_tokens=1e6)


def compute_seconds(*candidates: Candidate) -> dict[str, float]:
    costs = Balanced(seed=1).costs(1_000, candidates)
    return {name: terms.compute_seconds for name, terms in costs.items()}


def measured(name: str, rate: float | None, load: WorkerLoad = MUCH) -> Candidate:
    return Candidate(name, WorkerMatch(0, 0), load, rate)


def test_up_to_twice_as_fast_or_slow_is_the_same() -> None:
    """A worker that has much to do at once measures itself faster than its equal beside it."""
    seconds = compute_seconds(measured("a", 1_000.0), measured("b", 3_000.0))
    assert seconds["a"] == pytest.approx(seconds["b"])


def test_what_goes_beyond_that_counts() -> None:
    seconds = compute_seconds(measured("a", 100.0), measured("b", 10_000.0))
    assert seconds["a"] / seconds["b"] == pytest.approx(100 / 4, rel=0.03)


def test_a_worker_that_had_no_work_is_not_judged_by_what_it_once_measured() -> None:
    seconds = compute_seconds(measured("a", 10.0, WorkerLoad()), measured("b", 10_000.0))
    assert seconds["a"] == pytest.approx(seconds["b"])


def test_who_has_not_measured_any_is_taken_for_an_average_one() -> None:
    seconds = compute_seconds(measured("a", None), measured("b", 500.0))
    assert seconds == {"a": pytest.approx(2.0), "b": pytest.approx(2.0)}


def test_one_bad_measure_before_anything_was_sent_does_not_starve_a_worker() -> None:
    """It gets its share, and with it the chance to measure again."""
    book, policy, rng = LoadBook(), Balanced(seed=2), random.Random(2)
    rates = {"a": 2_000.0, "b": 200.0}
    work = dict.fromkeys(rates, 0)
    for number in range(100):
        tokens = rng.randrange(500, 1_500)
        candidates = [measured(name, rate, book.load(name)) for name, rate in rates.items()]
        chosen = policy.choose(tokens, candidates).worker_id
        book.begin(str(number), chosen, new_tokens=tokens, total_tokens=tokens)
        book.end(str(number))
        work[chosen] += tokens
        if work["b"] > 2_000:
            rates["b"] = 2_000.0  # it was as fast all the time
    assert max(work.values()) * 2 / sum(work.values()) < 1.1


def test_who_comes_later_counts_as_one_with_an_average_share_and_is_not_flooded() -> None:
    book, policy, rng = LoadBook(), Balanced(seed=3), random.Random(3)
    workers = ["a", "b", "c"]
    for number in range(300):
        chosen = workers[number % 3]
        book.begin(str(number), chosen, new_tokens=1_000, total_tokens=1_000)
        book.end(str(number))
    book.welcome("d")
    assert book.load("d").recent_tokens == pytest.approx(book.load("b").recent_tokens, rel=0.02)
    chosen_count = 0
    for number in range(40):
        tokens = rng.randrange(500, 1_500)
        candidates = [measured(name, 1_000.0, book.load(name)) for name in [*workers, "d"]]
        chosen = policy.choose(tokens, candidates).worker_id
        chosen_count += chosen == "d"
        book.begin(f"later {number}", chosen, new_tokens=tokens, total_tokens=tokens)
    assert 8 <= chosen_count <= 14


def test_the_first_worker_that_is_welcomed_has_had_no_work() -> None:
    book = LoadBook()
    book.welcome("a")
    assert book.load("a") == WorkerLoad()


def test_who_returns_keeps_what_is_under_way_there() -> None:
    book = LoadBook()
    book.begin("r", "a", new_tokens=10, total_tokens=20)
    book.begin("s", "b", new_tokens=50, total_tokens=60)
    book.welcome("a")
    assert (book.load("a").requests, book.load("a").queued_tokens) == (1, 10)
    book.end("r")
    assert book.load("a").queued_tokens == 0


def test_another_policy_makes_up_for_nothing_that_the_one_before_left_uneven() -> None:
    router = Router(KVBM(), "MaxPrefix")
    router.loads.begin("r", "a", new_tokens=10, total_tokens=20)
    router.set_policy("MaxPrefix")
    assert router.loads.load("a").recent_tokens == 10.0
    router.set_policy("Balanced")
    assert router.loads.load("a") == WorkerLoad(1, 10, 0, 0.0)
