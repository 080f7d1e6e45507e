"""Fixtures of the tests with real engines.

Engines rest between calls, so several may be alive; only one works at a time.
"""

import contextlib
from collections.abc import Iterator

import pytest
from reference import Reference


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """Answers of an engine without a connector and without a prefix cache."""
    with contextlib.ExitStack() as stack:
        yield Reference(stack)
