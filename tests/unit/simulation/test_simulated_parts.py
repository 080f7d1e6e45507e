"""The parts of a simulated instance: slots, the clock, the device's cache and the directory."""

from functools import partial

import pytest
from cluster_world import ROW_BYTES, TOKENS, instance_settings

from opal_connector.events import DEVICE_TIER, Delete, EventLog, Insert, ObjectFact
from opal_connector.keys import CHAIN_ROOT
from opal_connector.managers import SharedSpace, object_key
from opal_connector.simulation import DEVICES, ReplaySettings
from opal_connector.simulation.books import make_books
from opal_connector.simulation.clock import VirtualClock
from opal_connector.simulation.device import DeviceParameters, SimulatedDevice
from opal_connector.simulation.device_cache import DeviceCache
from opal_connector.simulation.directory import SimulatedDirectory, SimulatedKeeper
from opal_connector.simulation.slots import Slots
from opal_connector.transfers import InventoryPage, ObjectName, Question


def digest(number: int) -> bytes:
    return bytes([number]) * 32


# The virtual-time queue.


def test_calls_of_one_instant_run_in_the_order_of_their_planning() -> None:
    """Whatever order a heap has, a run is the same every time."""
    clock = VirtualClock()
    ran: list[tuple[float, str]] = []
    for name, delay_seconds in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.0)):
        clock.plan(delay_seconds, lambda name=name: ran.append((clock.now, name)))  # type: ignore[misc]

    while clock:
        clock.run_next()

    assert ran == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def test_slots_serve_in_order_and_never_more_at_once_than_their_limit() -> None:
    """Whoever comes late waits, and goes when somebody leaves."""
    slots = Slots(2)
    ran: list[int] = []
    for number in range(5):
        slots.enter(partial(ran.append, number))

    assert (ran, slots.waiting_count) == ([0, 1], 3)

    for _ in range(3):
        slots.leave()

    assert (ran, slots.waiting_count) == ([0, 1, 2, 3, 4], 0)
    slots.leave()
    slots.enter(partial(ran.append, 5))
    assert ran[-1] == 5


def test_slots_without_a_limit_make_nobody_wait() -> None:
    """Zero means any number, as everywhere in these settings."""
    slots = Slots()
    ran: list[int] = []

    for number in range(100):
        slots.enter(partial(ran.append, number))

    assert ran == list(range(100))


# A link that several share.


def test_shared_device_serves_its_users_as_one() -> None:
    """Two instances that read from one medium at once have half of it each."""
    clock = VirtualClock()
    link = SimulatedDevice(
        DeviceParameters(bandwidth_GBps=1, latency_nsec=0, concurrency=100, capacity_GB=1), clock
    )
    ended: list[float] = []
    for _ in range(2):
        link.submit(1, 1_000_000, lambda: ended.append(round(clock.now, 9)))

    while clock:
        clock.run_next()

    assert ended == [0.002, 0.002]


# What the device's own cache tells.


def test_device_cache_tells_runs_that_come_and_blocks_that_go() -> None:
    """Believing its facts gives its contents."""
    cache = DeviceCache(4, tells=True)
    a, b, c, d, e = (digest(number) for number in range(5))

    cache.put([a, b])
    assert cache.take() == [Insert(ObjectFact(0, CHAIN_ROOT, a + b), DEVICE_TIER)]

    cache.put([a, b, c, d])
    cache.put([a, e])

    assert cache.take() == [
        Insert(ObjectFact(0, b, c + d), DEVICE_TIER),
        Insert(ObjectFact(0, a, e), DEVICE_TIER),
        Delete(ObjectFact(0, b"", d), DEVICE_TIER),
    ]
    assert set(cache.blocks) == {a, b, c, e}


def test_device_cache_of_a_replay_tells_nothing() -> None:
    """Facts that nobody takes must not pile up."""
    cache = DeviceCache(4)

    cache.put([digest(1)])

    assert cache.take() == []


# One directory, several who mount it.


class Mounted:
    """Books over one directory, and whether they were told of changes."""

    def __init__(self, directory: SimulatedDirectory, settings: ReplaySettings) -> None:
        self.manager = make_books(
            settings,
            block_tokens=TOKENS,
            clock=VirtualClock(),
            log=EventLog(enabled=True),
            has_siblings=True,
        )
        [tier] = self.manager.storage.tiers
        self.tier = tier
        assert isinstance(tier.space, SharedSpace)
        self.manager.adopt(InventoryPage(0, 0, is_last=True))
        self.changes = 0
        self.keeper = SimulatedKeeper(
            directory, self.manager, 0, tier.space, changed=self._has_changed
        )

    def _has_changed(self) -> None:
        self.changes += 1

    def knows(self, name: ObjectName) -> bool:
        return any(record.run == name.run for record in self.tier.index.records.values())


@pytest.fixture
def mounted() -> tuple[Mounted, Mounted]:
    """Two instances and a directory of ten blocks."""
    directory = SimulatedDirectory(SimulatedDevice(DEVICES["DistributedFS"], VirtualClock()))
    settings = instance_settings(memory=0, shared=10)
    return Mounted(directory, settings), Mounted(directory, settings)


def name(number: int) -> ObjectName:
    return ObjectName(0, CHAIN_ROOT, digest(number))


def store(who: Mounted, number: int) -> None:
    """Somebody has written a file, and says so by its event."""
    fact = ObjectFact(0, CHAIN_ROOT, digest(number))
    who.keeper.follow([Insert(fact, "DistributedFS")], 0.0)


def ask(who: Mounted, *numbers: int) -> None:
    who.keeper.answer([Question(1, 0, tuple(name(number) for number in numbers), ())], 0.0)
    who.keeper.follow(who.manager.take_events(), 0.0)


def test_what_one_writes_the_other_finds_when_it_asks(mounted: tuple[Mounted, Mounted]) -> None:
    """A file is there once; the books of who asks know it from then on, up to the first gap."""
    one, other = mounted
    store(one, 1)
    store(one, 3)

    ask(other, 1, 2, 3)

    assert other.knows(name(1))
    assert not other.knows(name(3))
    assert len(one.keeper.directory) == 2
    assert other.changes == 1


def test_two_who_write_the_same_file_fill_the_directory_once(
    mounted: tuple[Mounted, Mounted],
) -> None:
    """Bytes are those of the files that are there."""
    for who in mounted:
        store(who, 1)

    assert mounted[0].keeper.directory.used_bytes == ROW_BYTES


def test_room_is_made_of_the_oldest_files_and_all_who_knew_them_hear_of_it(
    mounted: tuple[Mounted, Mounted],
) -> None:
    """Nobody goes on promising what somebody else has removed."""
    one, other = mounted
    for number in range(10):
        store(one, number)
    ask(other, 0, 1)
    one.keeper.directory.used([object_key(digest(0), 0)])

    free_bytes, gone = one.keeper.directory.room(10 * ROW_BYTES, ROW_BYTES)
    one.keeper.poll(0.0)

    assert gone[0] == object_key(digest(1), 0)  # the first was used since
    assert free_bytes >= ROW_BYTES
    assert not other.knows(name(1))
    assert other.knows(name(0))


def test_deletion_by_one_is_known_to_the_other(mounted: tuple[Mounted, Mounted]) -> None:
    """A file that its writer deletes is gone for everybody."""
    one, other = mounted
    store(one, 1)
    ask(other, 1)

    one.keeper.follow([Delete(ObjectFact(0, CHAIN_ROOT, digest(1)), "DistributedFS")], 0.0)

    assert not other.knows(name(1))
    assert one.keeper.directory.used_bytes == 0
