"""What the page is told of tiers, from what workers describe, hold and measure."""

from typing import Any

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.router.dashboard_snapshot import tiers
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import (
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
)
from opal_connector.keys import CHAIN_ROOT

MEDIUM = TierDescription("DistributedFS", is_persistent=True, shared_id="a medium")


def worker(index: KVBM, name: str, *own: TierDescription, blocks: dict[str, int]) -> None:
    description = InstanceDescription(
        instance_id=name, incarnation=1, model="m", block_tokens=16, tiers=(*own, MEDIUM)
    )
    index.join(description)
    for tier, count in blocks.items():
        hashes = b"".join(bytes([number + 1]) * 32 for number in range(count))
        index.process_kvc_events(name, [Insert(ObjectFact(0, CHAIN_ROOT, hashes), tier)])


def by_name(index: KVBM, systems: dict[str, SystemEvent]) -> dict[tuple[str, ...], Any]:
    return {(found.name, *found.workers): found for found in tiers(index.workers, systems)}


def test_a_shared_tier_is_shown_once_with_all_who_have_it_and_the_others_for_each() -> None:
    index = KVBM()
    host = TierDescription("CPUMemory")
    worker(index, "one", host, blocks={DEVICE_TIER: 3, "CPUMemory": 2, "DistributedFS": 5})
    worker(index, "two", host, blocks={"CPUMemory": 4})
    loads = {
        "one": SystemEvent(
            device_usage=0.25,
            tiers=(
                TierLoad("CPUMemory", 50, 100, 1e-9, 2e-9),
                TierLoad("DistributedFS", 10, 1_000, 1e-8),
            ),
        ),
        "two": SystemEvent(tiers=(TierLoad("DistributedFS", 20, 1_000, 2e-8, 1e-7),)),
    }
    found = by_name(index, loads)
    assert set(found) == {
        (DEVICE_TIER, "one"),
        ("CPUMemory", "one"),
        ("CPUMemory", "two"),
        ("DistributedFS", "one", "two"),
    }
    device = found[DEVICE_TIER, "one"]
    assert (device.blocks, device.used_share, device.capacity_bytes) == (3, 0.25, None)
    memory = found["CPUMemory", "one"]
    assert (memory.used_bytes, memory.capacity_bytes, memory.used_share) == (50, 100, 0.5)
    assert (round(memory.load_bytes_per_second), round(memory.store_bytes_per_second)) == (
        1_000_000_000,
        500_000_000,
    )
    shared = found["DistributedFS", "one", "two"]
    assert (shared.is_shared, shared.is_persistent, shared.blocks) == (True, True, 5)
    assert (shared.used_bytes, round(shared.load_bytes_per_second)) == (20, 100_000_000)


def test_two_media_of_one_name_are_two_tiers() -> None:
    index = KVBM()
    for name, medium in (("one", "a"), ("two", "b")):
        index.join(
            InstanceDescription(
                instance_id=name,
                incarnation=1,
                model="m",
                block_tokens=16,
                tiers=(TierDescription("DistributedFS", True, medium),),
            )
        )
    assert set(by_name(index, {})) == {("DistributedFS", "one"), ("DistributedFS", "two")}


def test_what_a_worker_has_not_said_is_unknown_and_not_zero() -> None:
    index = KVBM()
    worker(index, "one", TierDescription("CPUMemory"), blocks={DEVICE_TIER: 1})
    for systems in ({}, {"one": SystemEvent(tiers=(TierLoad("CPUMemory", 0, 0),))}):
        memory = by_name(index, systems)["CPUMemory", "one"]
        assert (memory.used_bytes, memory.capacity_bytes, memory.used_share) == (None, None, None)
        assert memory.load_bytes_per_second is None
        assert memory.blocks == 0
    assert by_name(index, {})[DEVICE_TIER, "one"].used_share is None
