"""What a router counts itself: requests under way, and the prefixes that they will soon bring."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opal_connector.cluster.loads import LoadBook, WorkerLoad
from opal_connector.cluster.predictions import Predictions
from opal_connector.cluster.worker_names import WorkerNames


def test_a_request_counts_as_queued_then_as_decoding_then_not_at_all() -> None:
    book = LoadBook(memory_requests=10)
    book.begin("r", "a", new_tokens=70, total_tokens=100)
    assert book.load("a") == WorkerLoad(1, 70, 0, 70.0)
    book.first_token("r")
    book.first_token("r")
    assert book.load("a") == WorkerLoad(1, 0, 100, 70.0)
    book.end("r")
    book.end("r")
    for number in range(10):
        book.begin(str(number), "b", new_tokens=1, total_tokens=1)
    assert book.load("a").recent_tokens == pytest.approx(70 / 2.718281828)
    assert book.load("a").requests == 0
    assert book.load("nobody") == WorkerLoad()


def test_what_an_answer_says_was_computed_replaces_what_was_expected() -> None:
    """A worker whose cache thrashes is not taken for idle, and saying it twice adds nothing."""
    book = LoadBook()
    book.begin("r", "a", new_tokens=10, total_tokens=100)
    book.computed("r", 90)
    book.computed("r", 90)
    assert book.load("a") == WorkerLoad(1, 90, 0, 90.0)
    book.first_token("r")
    assert book.load("a") == WorkerLoad(1, 0, 100, 90.0)
    book.computed("r", 40)
    book.end("r")
    assert book.load("a") == WorkerLoad(0, 0, 0, 40.0)
    book.computed("r", 1_000)
    assert book.load("a").recent_tokens == 40.0


def test_work_of_the_past_is_remembered_over_a_pause_however_long() -> None:
    """Requests age it, not time: a slow cluster sees the same evenness as a fast one."""
    book = LoadBook(memory_requests=1)
    book.begin("r", "a", new_tokens=10, total_tokens=10)
    before = book.load("a").recent_tokens
    assert before == book.load("a").recent_tokens == 10.0
    book.begin("s", "b", new_tokens=0, total_tokens=10)
    assert book.load("a").recent_tokens == pytest.approx(10 / 2.718281828)


def test_what_was_under_way_at_a_worker_that_is_gone_is_gone() -> None:
    book = LoadBook()
    book.begin("r", "a", new_tokens=1, total_tokens=1)
    book.begin("s", "b", new_tokens=1, total_tokens=1)
    book.remove_worker("a")
    book.first_token("r")
    book.end("r")
    assert len(book) == 1
    assert book.load("a") == WorkerLoad()


def test_a_request_that_is_sent_again_elsewhere_counts_once() -> None:
    book = LoadBook()
    book.begin("r", "a", new_tokens=5, total_tokens=5)
    book.begin("r", "b", new_tokens=5, total_tokens=5)
    assert (book.load("a").requests, book.load("b").requests) == (0, 1)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_all_requests_have_ended_every_load_is_zero(seed: int) -> None:
    rng = random.Random(seed)
    book = LoadBook()
    live: list[str] = []
    for number in range(60):
        what = rng.random()
        if what < 0.5 or not live:
            live.append(str(number))
            book.begin(live[-1], rng.choice("abc"), new_tokens=rng.randint(0, 9), total_tokens=9)
        elif what < 0.8:
            book.first_token(rng.choice(live))
        else:
            book.end(live.pop(rng.randrange(len(live))))
    for request_id in live:
        book.end(request_id)
    for worker in "abc":
        load = book.load(worker)
        assert (load.requests, load.queued_tokens, load.decoding_tokens) == (0, 0, 0)


def names_of(*workers: str) -> WorkerNames:
    names = WorkerNames()
    for worker in workers:
        names.add(worker)
    return names


HASHES = [bytes([number]) * 32 for number in range(1, 20)]


def test_a_prompt_under_way_is_expected_at_its_worker_until_events_have_had_their_time() -> None:
    names = names_of("a", "b")
    predictions = Predictions(grace_seconds=2.0)
    predictions.expect("r", names.bits["b"], HASHES[:5])
    assert predictions.depths(HASHES, -1, names) == {"b": 5}
    predictions.end("r", 10.0, is_computed=True)
    predictions.expire(11.9)
    assert predictions.depths(HASHES, -1, names) == {"b": 5}
    predictions.expire(12.0)
    assert predictions.depths(HASHES, -1, names) == {}
    assert len(predictions) == 0


def test_what_was_not_computed_is_not_expected_any_more_at_once() -> None:
    names = names_of("a")
    predictions = Predictions()
    predictions.expect("r", 1, HASHES[:5])
    predictions.expect("s", 1, HASHES[:2])
    predictions.end("r", 0.0, is_computed=False)
    assert predictions.depths(HASHES, -1, names) == {"a": 2}


def test_predictions_are_bounded_and_leave_with_their_worker() -> None:
    names = names_of("a", "b")
    predictions = Predictions(max_blocks=8)
    predictions.expect("r", 1, HASHES[:5])
    predictions.expect("s", 2, HASHES[:5])
    predictions.expect("t", 2, HASHES[:5])
    assert predictions.depths(HASHES, -1, names) == {"a": 5}
    predictions.remove_worker(1)
    predictions.end("r", 0.0, is_computed=True)
    predictions.expire(100.0)
    assert len(predictions) == 0
