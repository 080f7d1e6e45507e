"""The suite of engines over one in memory: what the classes above the clients do."""

import pytest
from dict_engine import DictClient, DictEngine, LendingClient, UnlistedClient
from engine_suite import EngineSuite

from opal_connector.tiers.engines import EngineClient


class DictWorld:
    """An engine in memory."""

    def __init__(self, kind: type[DictClient]) -> None:
        self.engine = DictEngine()
        self._kind = kind

    def client(self, timeout_seconds: float = 5.0) -> EngineClient:
        return self._kind(self.engine)

    def raw_get(self, key: str) -> bytes | None:
        return self.engine.values.get(key)

    def raw_put(self, key: str, value: bytes) -> None:
        self.engine.values[key] = value

    def raw_delete(self, key: str) -> None:
        self.engine.values.pop(key, None)


class TestDict(EngineSuite):
    @pytest.fixture
    def world(self) -> DictWorld:
        return DictWorld(DictClient)


class TestUnlistedDict(EngineSuite):
    """An engine that cannot say what it holds is asked about what the books know."""

    @pytest.fixture
    def world(self) -> DictWorld:
        return DictWorld(UnlistedClient)


class TestDictOfThreeMembers(TestDict):
    """Objects that three kv groups share: as many rows, for fewer blocks."""

    members = 3


class TestLendingDict(EngineSuite):
    """An engine whose library hands every value over in memory of its own."""

    @pytest.fixture
    def world(self) -> DictWorld:
        return DictWorld(LendingClient)


class TestLendingDictOfThreeMembers(TestLendingDict):
    members = 3


def test_nobody_overrides_a_test_of_the_suite() -> None:
    """An engine that cannot do what the suite asks is not a tier."""
    with pytest.raises(TypeError, match="overrides test_probe_leaves_nothing"):
        type("TestSpecial", (EngineSuite,), {"test_probe_leaves_nothing": lambda self: None})
