"""When engines are started again, and how many there should be: numbers in, numbers out."""

import pytest

from opal_connector.cli.serving.backoff import Backoff
from opal_connector.cli.serving.scaling import Scaling
from opal_connector.cli.serving.schema import RestartSettings, ScalingSettings

SETTINGS = ScalingSettings(
    enable_scaling=True,
    max_queue_threshold=4,
    scale_latency=40,
    max_workers=5,
    scale_in_share=0.5,
    quiet_seconds=60,
)


def waits(backoff: Backoff, count: int, served_seconds: float = 0.0) -> list[float | None]:
    return [backoff.next_wait(served_seconds) for _ in range(count)]


def test_waits_double_up_to_a_limit_and_then_it_is_given_up() -> None:
    backoff = Backoff(
        RestartSettings(first_seconds=1, longest_seconds=5, jitter=0, limit=5), seed=1
    )
    assert waits(backoff, 6) == [1, 2, 4, 5, 5, None]


def test_jitter_spreads_the_waits_and_stays_in_its_bounds() -> None:
    """Engines that ended together are not started together."""
    settings = RestartSettings(first_seconds=1, longest_seconds=1, jitter=0.2, limit=None)
    found = [wait for wait in waits(Backoff(settings, seed=3), 200) if wait is not None]
    assert len(found) == 200
    assert 0.8 <= min(found) < 0.85
    assert 1.15 < max(found) <= 1.2


def test_one_that_has_served_well_begins_anew() -> None:
    """A failure a day is not five failures in a row; a short success does not count."""
    backoff = Backoff(RestartSettings(first_seconds=1, jitter=0, well_seconds=60, limit=3))
    assert waits(backoff, 2) == [1, 2]
    assert waits(backoff, 1, served_seconds=59.0) == [4]
    assert waits(backoff, 3, served_seconds=60.0) == [1, 1, 1]
    assert waits(backoff, 3) == [2, 4, None]


def test_without_a_limit_it_is_never_given_up() -> None:
    """However often it fails, the wait stays a number."""
    backoff = Backoff(RestartSettings(longest_seconds=60, jitter=0, limit=None))
    assert waits(backoff, 2_000)[-1] == 60


def test_a_limit_of_zero_starts_nothing_again() -> None:
    assert Backoff(RestartSettings(limit=0)).next_wait(0.0) is None


def test_a_long_queue_brings_one_more_and_then_time_to_see_what_that_did() -> None:
    """Not two at once: an instance that is being started has not helped yet."""
    scaling = Scaling(SETTINGS, least=2)
    assert scaling.wanted(0, requests=8, instances=2) == 2
    assert scaling.wanted(1, requests=9, instances=2) == 3
    assert scaling.wanted(2, requests=100, instances=3) == 3
    assert scaling.wanted(40.9, requests=100, instances=3) == 3
    assert scaling.wanted(41, requests=100, instances=3) == 4


@pytest.mark.parametrize(("instances", "wanted"), [(5, 5), (4, 5)])
def test_there_are_never_more_than_the_most(instances: int, wanted: int) -> None:
    assert Scaling(SETTINGS, least=1).wanted(0, requests=10_000, instances=instances) == wanted


def test_one_leaves_when_the_rest_have_had_little_to_do_for_long() -> None:
    """Less than half of the threshold each, without it, and without a break."""
    scaling = Scaling(SETTINGS, least=1)
    assert scaling.wanted(0, requests=4, instances=3) == 3
    assert scaling.wanted(59, requests=4, instances=3) == 3
    assert scaling.wanted(60, requests=4, instances=3) == 2
    assert scaling.wanted(61, requests=0, instances=2) == 2
    assert scaling.wanted(120, requests=0, instances=2) == 2
    assert scaling.wanted(121, requests=0, instances=2) == 1


def test_a_burst_in_between_begins_the_quiet_time_anew() -> None:
    scaling = Scaling(SETTINGS, least=1)
    assert scaling.wanted(0, requests=0, instances=2) == 2
    assert scaling.wanted(50, requests=3, instances=2) == 2
    assert scaling.wanted(70, requests=0, instances=2) == 2
    assert scaling.wanted(129, requests=0, instances=2) == 2
    assert scaling.wanted(130, requests=0, instances=2) == 1


def test_between_the_thresholds_nothing_ever_changes() -> None:
    """The load that keeps the last one from leaving does not bring another one."""
    scaling = Scaling(SETTINGS, least=1)
    for now in range(0, 10_000, 7):
        assert scaling.wanted(now, requests=5 + now % 3, instances=2) == 2


@pytest.mark.parametrize("load", range(41))
def test_no_steady_load_makes_instances_come_and_go(load: int) -> None:
    """From wherever it begins, the number settles."""
    for instances in range(1, 6):
        scaling, changes = Scaling(SETTINGS, least=1), 0
        for now in range(0, 2_000, 5):
            wanted = scaling.wanted(now, requests=load, instances=instances)
            changes += wanted != instances
            instances = wanted
        assert changes <= 4


def test_there_are_never_fewer_than_the_least() -> None:
    """Idle or failing: one that is lost for good is replaced, and the last one stays."""
    scaling = Scaling(SETTINGS, least=2)
    assert [scaling.wanted(now, requests=0, instances=2) for now in (0, 100, 500)] == [2, 2, 2]
    assert scaling.wanted(600, requests=0, instances=1) == 2
