"""Books over memory and two tiers of files under random use. See `tier_machine.py`."""

import pytest

pytest.importorskip("hypothesis")
from hypothesis import settings
from tier_machine import TierMachine

TestTiers = TierMachine.TestCase
# As for one tier: what two jobs do to each other needs many steps.
TestTiers.settings = settings(
    max_examples=4 * settings().max_examples,
    stateful_step_count=settings().stateful_step_count + 20,
)
