"""Fixtures of the tests with real engines.

Engines rest between calls, so several may be alive; only one works at a time.
"""

import contextlib
from collections.abc import Iterator

import pytest
from reference import Reference
from router_engines import RouterEngine, router_engines


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """Answers of an engine without a connector and without a prefix cache."""
    with contextlib.ExitStack() as stack:
        yield Reference(stack)


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RouterEngine]]:
    """Servers for tests of the router, which leave them as healthy as they were."""
    with router_engines(tmp_path_factory.mktemp("router")) as running:
        yield running
