"""The follower of LMCache's bus, when what it lists after a loss cannot be listed."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from lmcache.v1.distributed.api import KeyEntry, KeyListPage, ObjectKey
from lmcache.v1.mp_observability.event import Event, EventType

from opal_connector.integrations.lmcache.bindings import TokenBindings
from opal_connector.integrations.lmcache.bus_follower import BusFollower
from opal_connector.integrations.lmcache.placements import PlacementBooks

OLD, NEW = (ObjectKey(bytes([number]) * 32, "model", 0, 0, "") for number in (1, 2))


class Adapter:
    """An adapter of LMCache's, whose listing may fail as that of its S3 adapter does."""

    def __init__(self, keys: Iterable[ObjectKey], *errors: Exception) -> None:
        self.keys = list(keys)
        self.errors = list(errors)
        self.listings = 0

    def list_l2_keys(self, cursor: str | None = None) -> KeyListPage:
        self.listings += 1
        if self.errors:
            raise self.errors.pop(0)
        return KeyListPage(
            tuple(KeyEntry(key.to_encoded_object_key(), 1) for key in self.keys), None
        )


class Followed:
    """A follower of adapters by name, each believed to have `OLD`, with its own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **adapters: Adapter) -> None:
        self.now = 100.0
        self.failing: list[Exception] = []
        monkeypatch.setattr(
            "opal_connector.integrations.lmcache.bus_follower.time",
            SimpleNamespace(monotonic=lambda: self.now),
        )
        pairs = [(SimpleNamespace(type_name=name), one) for name, one in adapters.items()]
        context: Any = SimpleNamespace(
            event_bus=SimpleNamespace(dropped_events_count=lambda: 5),
            storage_manager=SimpleNamespace(_l1_managers_by_id={}, l2_adapters=lambda: pairs),
            chunk_size=16,
        )
        self.placements = PlacementBooks(TokenBindings(16), lambda event: None, "model")
        for name in adapters:
            self.placements.add(f"l2/{name}", name, [OLD])
        self.bus = BusFollower(context, self.placements, self._changed)
        self.handlers = self.bus.get_subscriptions()

    def _changed(self) -> None:
        if self.failing:
            raise self.failing.pop(0)

    def tick(self) -> None:
        """A second later."""
        self.now += 1.0
        self.handlers[EventType.L1_EVICTION_LOOP_TICK](Event(EventType.L1_EVICTION_LOOP_TICK))

    def bad_event(self) -> None:
        """An event that cannot be read."""
        self.handlers[EventType.L2_KEYS_STORED](Event(EventType.L2_KEYS_STORED, metadata={}))

    def believed(self, name: str) -> list[ObjectKey]:
        """What an adapter is believed to have."""
        return [key for _, key in self.placements.keys(f"l2/{name}")]


@pytest.mark.parametrize("error", [RuntimeError("circuit open"), TimeoutError("listing")])
def test_what_cannot_be_listed_now_is_listed_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Meanwhile what is believed of it is kept, and the other adapter is right at once."""
    broken, good = Adapter([NEW], error), Adapter([NEW])
    world = Followed(monkeypatch, s3=broken, other=good)
    world.bus.on_drops()
    assert (world.believed("s3"), world.believed("other")) == ([OLD], [NEW])
    assert (world.bus.failures, world.bus.resyncs) == (1, 1)
    world.tick()
    assert world.believed("s3") == [NEW]
    assert (world.bus.failures, world.bus.resyncs) == (1, 1)
    world.tick()
    assert broken.listings == 2, "listed again though nothing is missing"


def test_what_can_never_be_listed_is_tried_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rights that allow to read and write and not to list: the bus has other things to do."""
    refusing, good = Adapter([NEW], *[PermissionError("list")] * 600), Adapter([NEW])
    world = Followed(monkeypatch, s3=refusing, other=good)
    world.bus.on_drops()
    for _ in range(600):
        world.tick()
    assert good.listings == 1
    assert 10 < refusing.listings < 20
    assert (world.bus.failures, world.bus.resyncs) == (refusing.listings, 1)


def test_events_that_cannot_be_read_do_not_list_again_before_it_is_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would ask a backend that has just failed, in the thread of the bus."""
    broken = Adapter([NEW], RuntimeError("circuit open"))
    world = Followed(monkeypatch, s3=broken)
    for _ in range(10):
        world.bad_event()
    assert (broken.listings, world.bus.failures) == (1, 11)
    world.tick()
    assert world.believed("s3") == [NEW]


def test_whatever_fails_in_a_listing_it_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what comes after the adapters: nothing leaves the hook, nothing stays wrong."""
    world = Followed(monkeypatch, s3=Adapter([NEW]))
    world.failing = [ValueError("no port"), ValueError("no port")]
    world.bus.on_drops()
    world.bad_event()
    world.tick()
    assert (world.bus.failures, world.bus.resyncs) == (3, 0)
    world.tick()
    assert world.bus.resyncs == 1
    assert world.believed("s3") == [NEW]


def test_an_adapter_that_never_lists_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not say what it has, now or later."""
    world = Followed(monkeypatch, mock=Adapter([NEW], NotImplementedError()))
    world.bus.on_drops()
    assert world.believed("mock") == []
    assert (world.bus.failures, world.bus.resyncs) == (0, 1)
