"""The server module with Opal's adapter in the same process: its tiers as they really are."""

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import until
from lmcache.v1.distributed.api import ObjectKey
from module_world import CHUNK_TOKENS, World, prompts, server

from opal_connector.events import Delete, Move

PROMPT = list(range(100, 100 + 5 * CHUNK_TOKENS))
ROW_BYTES = 64 << 10


def adapter(directory: Path, *, host_rows: int = 64, disk_rows: int = 256) -> dict[str, Any]:
    """Opal's adapter, with tiers of so many objects."""
    return {
        "type": "plugin",
        "module_path": "opal_connector.integrations.lmcache.l2_adapter",
        "class_name": "OpalL2Adapter",
        "adapter_params": {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "CPUMemory": {"capacity_GB": f"{host_rows * ROW_BYTES}B"},
            "LocalNVMe": {
                "path": str(directory),
                "capacity_GB": f"{disk_rows * (ROW_BYTES + 4096)}B",
                "reserve_GB": 0,
                "write": "demote",
            },
        },
    }


def is_gone(world: World, keys: list[ObjectKey]) -> bool:
    """Whether L1 has let go of keys, whose locks may still be held for a moment."""
    return bool(world.manager.delete_l1_keys(keys)[1] == 0)


def is_mirrored(world: World) -> bool:
    """Whether Opal has everything that was ever stored into L1."""
    books = world.manager.l2_adapters()[0][1].books
    return len(books.catalog) == len(world.digests)


def test_opals_tiers_are_announced_each_and_a_demotion_is_a_move(tmp_path: Path) -> None:
    """LMCache knows of one adapter that has a key; where it is, only Opal knows."""
    with server(adapter(tmp_path, host_rows=8)) as world:
        for prompt in prompts(3, 8):
            stored = world.store(prompt)
            until(lambda: is_mirrored(world), "the store to the adapter")
            until(lambda keys=stored: is_gone(world, keys), "L1 is empty")  # type: ignore[misc]
            world.drain()
        world.settle(world.held)
        assert 0 < len(world.announced()[0, "CPUMemory"]) <= 8
        assert len(world.announced()[0, "LocalNVMe"]) > 8
        moves = [event for event in world.events if isinstance(event, Move)]
        assert {(move.source_tier, move.target_tier) for move in moves} == {
            ("CPUMemory", "LocalNVMe")
        }


def test_a_chunk_leaves_host_memory_when_neither_l1_nor_opal_has_it_there(tmp_path: Path) -> None:
    """Both are memory of the host: to who wants the chunk they are one tier."""
    with server(adapter(tmp_path)) as world:
        keys = world.store(PROMPT)
        world.settle(world.held)
        until(lambda: is_mirrored(world), "the store to the adapter")
        world.manager.delete_l1_keys(keys)
        world.settle(world.held)
        assert not any(isinstance(event, Delete) for event in world.events)
        world.manager.l2_adapters()[0][1].delete(keys)
        world.settle(world.held)
        assert world.announced() == {}


def test_what_a_tier_kept_through_a_restart_is_announced_once_its_tokens_are_known(
    tmp_path: Path,
) -> None:
    """The disk has the bytes and LMCache's names of them; the next prompt tells what they are."""
    with server(adapter(tmp_path, host_rows=1)) as world:
        world.store(PROMPT)
        world.settle(world.held)
    with server(adapter(tmp_path, host_rows=1)) as world:
        books = world.manager.l2_adapters()[0][1].books
        until(lambda: len(books.catalog) > 0, "the disk has been read")
        world.drain()
        assert world.events == []
        world.module._placements.announce_model("model")
        world.names(PROMPT)
        world.tell_tokens(PROMPT)
        world.settle(world.held)
        assert world.announced()[0, "LocalNVMe"]


def test_an_adapter_that_is_taken_away_takes_its_tiers_along(tmp_path: Path) -> None:
    """LMCache can do that at run time."""
    with server(adapter(tmp_path, host_rows=1)) as world:
        world.store(PROMPT)
        until(lambda: is_mirrored(world), "the store to the adapter")
        world.settle(world.held)
        assert (0, "LocalNVMe") in world.announced()
        world.manager.delete_l2_adapter(0)
        world.settle(world.held)
        assert set(world.announced()) == {(0, "CPUMemory")}


@pytest.mark.parametrize("seed", range(4))
def test_what_is_announced_is_what_all_tiers_hold_after_any_stores_and_evictions(
    tmp_path: Path, seed: int
) -> None:
    """With tiers under pressure, moves, and events lost on LMCache's bus."""
    numbers = random.Random(seed)
    texts = prompts(seed, 12)
    tiers = adapter(tmp_path, host_rows=8, disk_rows=24)
    with server(tiers, l1_mib=0.5, queue_size=numbers.choice([12, 10_000])) as world:
        for _ in range(80):
            text = numbers.choice(texts)
            match numbers.randrange(5):
                case 0 | 1 | 2:
                    world.store(text)
                case 3:
                    keys = world.keys(text)
                    world.manager.delete_l1_keys(numbers.sample(keys, 3))
                    if numbers.random() < 0.3:
                        world.manager.l2_adapters()[0][1].delete(keys[3:])
                case 4:
                    world.drain()
        world.drain()
        for text in texts:
            world.names(text)
            world.tell_tokens(text)
            world.drain()
        world.settle(world.held)
