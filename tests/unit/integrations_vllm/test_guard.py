"""What leaves a hook: its answer, or its default, a count and one warning; never an exception."""

import logging

import pytest

pytest.importorskip("vllm")
from opal_connector.integrations.vllm import guard
from opal_connector.integrations.vllm.guard import contained, guarded
from opal_connector.reports import RateLimitedWarnings

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No count and no warning of other tests."""
    monkeypatch.setattr(guard, "hook_faults", {})
    monkeypatch.setattr(guard, "warnings", RateLimitedWarnings(guard.logger))


class Half:
    """A half with one hook."""

    @guarded(lambda: (0, False))
    def match(self, tokens: int, *, divisor: int = 1) -> tuple[int | None, bool]:
        """The hook's own words."""
        return tokens // divisor, True


def test_answer_of_a_hook_passes_through() -> None:
    """Positional, keyword, and the hook's name and words."""
    assert Half().match(8, divisor=2) == (4, True)
    assert Half.match.__name__ == "match"
    assert Half.match.__doc__ == "The hook's own words."
    assert guard.hook_faults == {}


def test_i7_exception_becomes_the_default(caplog: pytest.LogCaptureFixture) -> None:
    """The host gets the harmless answer; the fault is counted, and said once a minute."""
    with caplog.at_level(logging.WARNING):
        answers = [Half().match(8, divisor=0) for _ in range(5)]

    assert answers == [(0, False)] * 5
    assert guard.hook_faults == {"match": 5}
    assert [record.getMessage() for record in caplog.records] == [
        "match failed and was answered with a default: "
        "ZeroDivisionError('integer division or modulo by zero')"
    ]


def test_trace_is_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks for the defect finds the place."""
    with caplog.at_level(logging.DEBUG):
        Half().match(8, divisor=0)

    assert any(record.exc_info for record in caplog.records)


def test_default_is_made_anew_for_every_fault() -> None:
    """Two hooks that failed do not share a list."""

    @guarded(set)
    def errors() -> set[int]:
        raise RuntimeError

    first, second = errors(), errors()

    assert first == second == set()
    assert first is not second


def test_assertion_is_a_fault_like_any_other() -> None:
    """A programmer's error costs a miss, not the engine."""

    @guarded(lambda: None)
    def hook() -> None:
        raise AssertionError("no")

    assert hook() is None
    assert guard.hook_faults == {"hook": 1}


def test_interrupt_is_not_a_fault() -> None:
    """The host's own way to end is never swallowed."""

    @guarded(lambda: None)
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()


def test_contained_part_of_a_hook_lets_the_rest_go_on() -> None:
    """One bad result does not keep the others from being booked."""
    done = []
    for number in range(3):
        with contained("take_output"):
            if number == 1:
                raise ValueError(number)
            done.append(number)

    assert done == [0, 2]
    assert guard.hook_faults == {"take_output": 1}
