"""The books of several attention groups under random use. See `hybrid_machine.py`."""

import pytest

pytest.importorskip("hypothesis")
from hybrid_machine import LAYOUTS, HybridMachine
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test


@pytest.mark.parametrize("name", LAYOUTS)
def test_books_of_several_groups_are_right_whatever_happens(name: str) -> None:
    """Right bytes, longest hits, events that add up, and nothing left promised in the end."""
    machine = type("Machine", (HybridMachine,), {"layout": LAYOUTS[name]})

    run_state_machine_as_test(
        machine, settings=settings(stateful_step_count=settings().stateful_step_count + 10)
    )
