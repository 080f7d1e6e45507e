"""The suites of engines over a real S3 endpoint."""

from collections.abc import Iterator

import pytest
from engine_fault_suite import EngineFaultSuite
from integration.engines.object_store_server import BUCKET, ObjectStoreServer

from opal_connector.config import EngineTierConfig, ObjectStoreConfig
from opal_connector.tiers.engines import EngineClient
from opal_connector.tiers.engines.object_store import ObjectStoreClient

PREFIX = "some/prefix"
URL = f"s3://{BUCKET}/{PREFIX}"


class ObjectStoreWorld:
    """A bucket, and its objects around our client."""

    tier = "ObjectStore"

    def __init__(self, server: ObjectStoreServer) -> None:
        self._server = server

    def settings(self) -> EngineTierConfig:
        return ObjectStoreConfig(
            url=URL,
            options=self._server.options,
            lookup_timeout_seconds=1.0,
            refresh_seconds=0.5,
        )

    def client(self, timeout_seconds: float = 5.0) -> EngineClient:
        return ObjectStoreClient(URL, options=self._server.options, timeout_seconds=timeout_seconds)

    def raw_get(self, key: str) -> bytes | None:
        full = f"{PREFIX}/{key}"
        return self._server.raw_get(full) if full in self._server.raw_list(full) else None

    def raw_put(self, key: str, value: bytes) -> None:
        self._server.raw_put(f"{PREFIX}/{key}", value)

    def raw_delete(self, key: str) -> None:
        self._server.raw_delete(f"{PREFIX}/{key}")

    def raw_keys(self) -> list[str]:
        return [key.removeprefix(f"{PREFIX}/") for key in self._server.raw_list(f"{PREFIX}/")]

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        if not self._server.is_running:
            self._server.start()
            self._server.make_bucket()

    def pause(self) -> None:
        if self._server.is_running:
            self._server.pause()

    def resume(self) -> None:
        if self._server.is_running:
            self._server.resume()

    def restart_empty(self) -> None:
        self._server.restart(empty=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStoreServer]:
    server = ObjectStoreServer()
    server.start()
    try:
        server.make_bucket()
        yield server
    finally:
        server.stop()


class TestObjectStore(EngineFaultSuite):
    is_persistent = False  # the endpoint of the tests has its buckets in memory

    @pytest.fixture
    def world(self, server: ObjectStoreServer) -> ObjectStoreWorld:
        return ObjectStoreWorld(server)
