"""The books under random use: I1 to I5 and I8 after every step. See `book_machine.py`."""

import pytest

pytest.importorskip("hypothesis")
from book_machine import BookMachine
from hypothesis import settings

TestBooks = BookMachine.TestCase
# Four times the profile: what two requests do to each other needs many steps.
TestBooks.settings = settings(
    max_examples=4 * settings().max_examples,
    stateful_step_count=settings().stateful_step_count + 10,
)
