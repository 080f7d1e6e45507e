"""The suites of engines over a real Mooncake Store: its master and a process that gives memory."""

import pytest
from engine_fault_suite import EngineFaultSuite
from integration.engines.mooncake_server import MooncakeServer, wait_until_ready

from opal_connector.config import EngineTierConfig, MooncakeConfig
from opal_connector.tiers.engines import EngineClient
from opal_connector.tiers.engines.mooncake_listing import ListingMooncakeClient

PREFIX = "opal/"


class MooncakeWorld:
    """A store, and its values around our client.

    The clients list what is there. Whole instances, by `settings`, have to ask for it.
    """

    tier = "Mooncake"

    def __init__(self, server: MooncakeServer) -> None:
        self._server = server
        self._is_running = True

    def settings(self) -> EngineTierConfig:
        return MooncakeConfig(
            master=self._server.master,
            metadata=self._server.metadata,
            lookup_timeout_seconds=1.0,
            refresh_seconds=0.5,
        )

    def client(self, timeout_seconds: float = 5.0) -> EngineClient:
        client = ListingMooncakeClient(
            master=self._server.master,
            metadata=self._server.metadata,
            admin=self._server.admin,
            timeout_seconds=timeout_seconds,
        )
        wait_until_ready(client)
        return client

    def raw_get(self, key: str) -> bytes | None:
        return self._server.raw_get(PREFIX + key)

    def raw_put(self, key: str, value: bytes) -> None:
        assert self._server.raw_put(PREFIX + key, value)

    def raw_delete(self, key: str) -> None:
        self._server.raw_delete(PREFIX + key)

    def raw_keys(self) -> list[str]:
        return [key.removeprefix(PREFIX) for key in self._server.raw_keys()]

    def stop(self) -> None:
        self._server.stop()
        self._is_running = False

    def start(self) -> None:
        if not self._is_running:
            self._server.start()
            self._is_running = True

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def restart_empty(self) -> None:
        self._server.restart()
        self._is_running = True


class TestMooncake(EngineFaultSuite):
    is_persistent = False  # its memory is all that it has

    @pytest.fixture
    def world(self, mooncake: MooncakeServer) -> MooncakeWorld:
        return MooncakeWorld(mooncake)
