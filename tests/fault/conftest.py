"""Hosts over a medium that the test controls."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from medium import Medium, works
from soak.driver import TIMEOUT_SECONDS
from soak.host import Host, HostSettings


@pytest.fixture
def medium(tmp_path: Path) -> Iterator[Medium]:
    """All calls below the test's directory."""
    with Medium(tmp_path).installed() as made:
        yield made


@pytest.fixture
def make_host(tmp_path: Path, medium: Medium) -> Iterator[Callable[..., Host]]:
    """Opened hosts over the same directories, closed with the test."""
    with contextlib.ExitStack() as hosts:

        def make(**settings: object) -> Host:
            known = {"timeout_seconds": TIMEOUT_SECONDS, "memory_blocks": 2}
            host = Host(HostSettings(**{**known, **settings}), tmp_path)  # type: ignore[arg-type]
            hosts.callback(host.close)
            host.open()
            return host

        yield make
        medium.rule = works
