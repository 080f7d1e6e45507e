"""How long PUTs without an answer are waited for, without a server."""

import pytest

from opal_connector.tiers.engines import object_store_late
from opal_connector.tiers.engines.object_store_late import LatePuts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands where its only item says."""
    now = [1000.0]
    monkeypatch.setattr(object_store_late.time, "monotonic", lambda: now[0])
    return now


def test_the_wait_begins_with_the_first_answer_and_anew_with_every_put(clock: list[float]) -> None:
    """A server that has not answered since may have stood still for hours."""
    late = LatePuts(10.0)
    late.add("a")
    clock[0] += 3600
    assert late.seconds_to_wait() == 1.0
    clock[0] += 0.75
    assert late.seconds_to_wait() == 0.25
    clock[0] += 5
    assert late.seconds_to_wait() == 0.0
    late.add("b")
    assert late.seconds_to_wait() == 1.0


def test_the_wait_leaves_time_for_two_removals_within_the_timeout(clock: list[float]) -> None:
    """A short timeout has a short wait."""
    del clock
    assert LatePuts(0.5).seconds_to_wait() == 0.25


def test_keys_are_known_until_they_are_forgotten() -> None:
    """By name and by prefix; others never."""
    late = LatePuts(10.0)
    for key in ("n/a", "n/b", "m/a", "n/a"):
        late.add(key)
    assert list(late.among(["n/b", "x", "m/a"])) == ["n/b", "m/a"]
    assert late.under("n/") == ["n/a", "n/b"]
    late.forget(late.among(["n/a", "x"]))
    assert late.under("n/") == ["n/b"]
    assert not late.among(["n/a"])


def test_a_put_that_was_added_during_a_removal_is_kept() -> None:
    """The removal came before it."""
    late = LatePuts(10.0)
    late.add("a")
    removed = late.among(["a"])
    late.add("a")
    late.forget(removed)
    assert late.under("") == ["a"]


def test_the_oldest_go_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of faults."""
    monkeypatch.setattr(object_store_late, "_MOST", 3)
    late = LatePuts(10.0)
    for key in "abcde":
        late.add(key)
    assert late.under("") == ["c", "d", "e"]
