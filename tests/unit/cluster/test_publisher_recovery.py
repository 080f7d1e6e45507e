"""How the event channel comes back from a fault of its own, and what it costs meanwhile."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import make_manager, store
from publisher_world import BooksSource, Listener, open_channel, wait_until

from opal_connector.cluster import publisher as module
from opal_connector.cluster.channel_facts import Block
from opal_connector.cluster.publisher import Publisher
from opal_connector.events import DEVICE_TIER, Insert, KVCEvent, ObjectFact
from opal_connector.keys import CHAIN_ROOT


class _NoListing(BooksSource):
    """Cannot list its books, so that no new incarnation succeeds."""

    is_faulty = False

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        if self.is_faulty:
            raise RuntimeError("a fault")
        return super().list_facts(group, tier)


def test_waiting_to_begin_anew_takes_no_time_from_the_engine(channels: list[Publisher]) -> None:
    """A thread that spins holds the interpreter that the engine needs."""
    source = _NoListing(make_manager(rows=8))
    channels.append(open_channel(make_manager(rows=8), source=source))
    publisher = channels[0]
    source.is_faulty = True
    with Listener(publisher):
        publisher._begin_anew_at = time.monotonic()
        publisher.hear(Insert(ObjectFact(0, CHAIN_ROOT, bytes(32)), "CPUMemory"))
        wait_until(lambda: (publisher._begin_anew_at or 0) > time.monotonic() + 3, "the fault")
        assert publisher._thread.ident is not None
        clock = time.pthread_getcpuclockid(publisher._thread.ident)
        before = time.clock_gettime(clock)
        end = time.monotonic() + 1.0
        wait_until(lambda: time.monotonic() >= end, "the span that is measured")
        assert time.clock_gettime(clock) - before < 0.1


class _FaultyDevice:
    """Fails at one thing that it was told, in the middle of it."""

    def __init__(self) -> None:
        self.is_complete = True
        self.groups = (0,)
        self.blocks: list[Block] = []

    def translate(self, raw: Any) -> list[KVCEvent]:
        if raw == "bad":
            raise ValueError("what is this?")
        self.blocks.append((CHAIN_ROOT, raw))
        return [Insert(ObjectFact(0, CHAIN_ROOT, raw), DEVICE_TIER)]

    def held(self, group: int) -> list[Block]:
        return self.blocks if group == 0 else []

    def forget(self) -> None:
        self.blocks = []
        self.is_complete = False


def test_a_device_of_which_an_event_could_not_be_read_is_known_anew(
    channels: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event may have been a removal: what it named would be there for ever."""
    monkeypatch.setattr(module, "_ANEW_SECONDS", 0.05)
    manager = make_manager(rows=8)
    device = _FaultyDevice()
    channels.append(open_channel(manager, device))
    store(manager, range(2))
    with Listener(channels[0]) as listener:
        first = listener.beats[0].incarnation
        channels[0].hear_device(b"a" * 32)
        channels[0].hear_device("bad")
        wait_until(lambda: listener.beats[-1].incarnation > first, "another incarnation")
        digests = {digest.tier: digest for digest in listener.beats[-1].digests}

        assert DEVICE_TIER not in digests or digests[DEVICE_TIER].block_count == 0
        assert not device.is_complete
