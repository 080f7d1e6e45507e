"""Warnings that a fault may cause a thousand times a second, said at most once a minute."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fakes import FakeClock

from opal_connector.reports import QUIET_SECONDS, RateLimitedWarnings

LOGGER = logging.getLogger("opal_connector.test")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(0.0)


@pytest.fixture
def warnings(clock: FakeClock) -> RateLimitedWarnings:
    return RateLimitedWarnings(LOGGER, clock)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


def test_first_warning_is_said_at_once(
    warnings: RateLimitedWarnings, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the clock has just begun."""
    warnings.warn("io", "cannot load from tier %d: %r", 0, "x")

    assert said(caplog) == ["cannot load from tier 0: 'x'"]
    assert caplog.records == []


def test_repetitions_are_counted_and_said_later(
    warnings: RateLimitedWarnings, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Quiet for a minute, then one line that says how many were left out."""
    for _ in range(1000):
        warnings.warn("io", "bad %s", "tier")
    assert said(caplog) == ["bad tier"]
    clock.now += QUIET_SECONDS - 0.001
    warnings.warn("io", "bad %s", "tier")
    assert said(caplog) == []
    clock.now += 0.001

    warnings.warn("io", "bad %s", "tier")

    assert said(caplog) == ["bad tier (1000 more like this in the last minute)"]
    clock.now += QUIET_SECONDS
    warnings.warn("io", "bad %s", "tier")
    assert said(caplog) == ["bad tier"]


def test_kinds_are_apart(warnings: RateLimitedWarnings, caplog: pytest.LogCaptureFixture) -> None:
    """A noisy fault does not hide another one."""
    warnings.warn("io", "a")
    warnings.warn("checksum", "b")
    warnings.warn("io", "a")

    assert said(caplog) == ["a", "b"]


def test_level_is_warning(warnings: RateLimitedWarnings, caplog: pytest.LogCaptureFixture) -> None:
    """A degradation is a warning, under the logger that was given."""
    warnings.warn("io", "a")

    assert [(record.levelno, record.name) for record in caplog.records] == [
        (logging.WARNING, LOGGER.name)
    ]


def test_percent_sign_in_an_argument_is_text(
    warnings: RateLimitedWarnings, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments are never taken for a format."""
    warnings.warn("io", "bad %s", "100 %d")
    warnings.warn("io", "bad %s", "100 %d")
    clock.now += QUIET_SECONDS
    warnings.warn("io", "bad %s", "100 %d")

    assert said(caplog) == [
        "bad 100 %d",
        "bad 100 %d (1 more like this in the last minute)",
    ]


def test_threads_that_fail_together_say_it_once(
    warnings: RateLimitedWarnings, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Transfer threads share it: one line, and no repetition lost from the count."""
    barrier = threading.Barrier(8)

    def fail(_: int) -> None:
        barrier.wait(20)
        for _ in range(200):
            warnings.warn("io", "bad")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(8)))
    assert said(caplog) == ["bad"]
    clock.now += QUIET_SECONDS
    warnings.warn("io", "bad")

    assert said(caplog) == ["bad (1599 more like this in the last minute)"]
