"""Engines that several modules of tests use."""

from collections.abc import Iterator

import pytest
from integration.engines.mooncake_server import MooncakeServer, mooncake_server


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeServer]:
    """One Mooncake Store for all tests, which leave it well, with whatever in it."""
    with mooncake_server(tmp_path_factory.mktemp("mooncake")) as server:
        yield server


@pytest.fixture
def well(mooncake: MooncakeServer) -> Iterator[MooncakeServer]:
    """The store for a test that harms it; well again afterwards."""
    yield mooncake
    mooncake.resume()
    mooncake.wait_until_usable()
