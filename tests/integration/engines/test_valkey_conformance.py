"""The suites of engines over a real server of Debian, which persists what it was told."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fault_suite import EngineFaultSuite
from valkey_server import ValkeyServer, valkey_server

from opal_connector.config import EngineTierConfig, ValkeyConfig
from opal_connector.tiers.engines import EngineClient
from opal_connector.tiers.engines.valkey import ValkeyClient

PREFIX = "opal:"


class ValkeyWorld:
    """A server, and its values around our client."""

    tier = "Valkey"

    def __init__(self, server: ValkeyServer) -> None:
        self._server = server
        self._is_running = True

    def settings(self) -> EngineTierConfig:
        return ValkeyConfig(url=self._server.url, lookup_timeout_seconds=1.0, refresh_seconds=0.5)

    def client(self, timeout_seconds: float = 5.0) -> EngineClient:
        return ValkeyClient(self._server.url, timeout_seconds=timeout_seconds)

    def raw_get(self, key: str) -> bytes | None:
        return self._server.value(PREFIX + key)

    def raw_put(self, key: str, value: bytes) -> None:
        self._server.command("SET", PREFIX + key, value)

    def raw_delete(self, key: str) -> None:
        self._server.command("DEL", PREFIX + key)

    def raw_keys(self) -> list[str]:
        keys = self._server.command("KEYS", f"{PREFIX}*")
        return [key.decode().removeprefix(PREFIX) for key in keys]

    def fill(self) -> None:
        """It may evict nothing, and has more than it may have."""
        self._server.command("CONFIG", "SET", "maxmemory", "1")

    def drain(self) -> None:
        self._server.command("CONFIG", "SET", "maxmemory", "0")

    def stop(self) -> None:
        self._server.stop()
        self._is_running = False

    def start(self) -> None:
        if not self._is_running:
            self._server.restart(empty=False)
            self._is_running = True

    def pause(self) -> None:
        if self._is_running:
            self._server.pause()

    def resume(self) -> None:
        with contextlib.suppress(AssertionError):  # it was stopped meanwhile
            self._server.resume()

    def restart_empty(self) -> None:
        self._server.restart(empty=True)
        self._is_running = True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    directory: Path = tmp_path_factory.mktemp("valkey")
    with valkey_server(directory, appendonly=True) as server:
        yield server


class TestValkey(EngineFaultSuite):
    @pytest.fixture
    def world(self, server: ValkeyServer) -> ValkeyWorld:
        return ValkeyWorld(server)
