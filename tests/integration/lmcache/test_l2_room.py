"""Room: who gets it, who leaves, and what goes to the next tier."""

import time
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

import torch
from l2_world import (
    SIZE,
    assert_told_exactly,
    buffer_of,
    hosted,
    key_of,
    layout_of,
    loads_what_was_stored,
    store_some,
    tiers_of,
    until,
)
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj


def test_memory_makes_room_when_a_store_needs_it() -> None:
    """No watermark and no second: every store succeeds, the limit holds, the oldest have left."""
    with hosted(tiers_of(None, memory="1MiB")) as host:
        assert all(store_some(host, range(40)))

        tier = host.tier("CPUMemory")
        assert tier.used_bytes <= tier.capacity_bytes
        found = host.look_up([key_of(n) for n in range(40)])
        assert found == [False] * 24 + [True] * 16
        assert_told_exactly(host)


def test_a_full_disk_tier_makes_room_while_the_store_waits(tmp_path: Path) -> None:
    """Deleting files takes a while: a store waits for it and is not dropped."""
    with hosted(tiers_of(tmp_path, memory=None, disk="1MiB")) as host:
        assert all(store_some(host, range(40)))

        assert host.tier("LocalNVMe").used_bytes <= 1 << 20
        host.settle()
        assert_told_exactly(host)
        assert loads_what_was_stored(host, 39, SIZE)


def test_what_memory_gives_up_goes_to_disk(tmp_path: Path) -> None:
    """With "demote" an eviction is a move: no key is lost, and none is written twice."""
    params = tiers_of(tmp_path, memory="1MiB", LocalNVMe={"write": "demote"})
    with hosted(params) as host:
        assert all(store_some(host, range(40)))
        host.settle()

        assert len(host.tier("LocalNVMe")) >= 24
        assert len(host.tier("CPUMemory")) + len(host.tier("LocalNVMe")) == 40
        assert len(host.told.there) == 40
        assert all(loads_what_was_stored(host, n, SIZE) for n in range(40))
        assert_told_exactly(host)


def test_objects_of_all_sizes_share_the_room() -> None:
    """Layouts of one model differ in size: each takes the rows that it needs, and no more."""
    sizes = [SIZE // 2, SIZE, SIZE + 4, 3 * SIZE, 5 * SIZE + 100]
    with hosted(tiers_of(None, memory="4MiB")) as host:
        for number, size in enumerate(sizes):
            assert host.store([key_of(number)], [buffer_of(size, number + 1)]).is_successful()

        assert all(loads_what_was_stored(host, n, size) for n, size in enumerate(sizes))
        assert host.tier("CPUMemory").used_bytes == (1 + 1 + 2 + 3 + 6) * SIZE
        assert host.adapter.get_usage().total_bytes_used == sum(sizes)


def test_serialized_objects_keep_their_length() -> None:
    """LMCache's serializers narrow a buffer to what they wrote, and load into the whole of it."""
    written = TensorMemoryObj(buffer_of(SIZE, 1).raw_data, bytes_of(SIZE), parent_allocator=None)
    written.set_used_size(SIZE - 1000)
    with hosted(tiers_of(None)) as host:
        assert host.store([key_of(0)], [written]).bytes_transferred() == SIZE - 1000
        # The lookup names the layout of the engine, which the bytes say nothing of.
        assert host.look_up([key_of(0)], layout_of(buffer_of(4 * SIZE))) == [True]
        target = TensorMemoryObj(buffer_of(SIZE).raw_data, bytes_of(SIZE), parent_allocator=None)
        assert host.load([key_of(0)], [target]) == [True]
        assert torch.equal(target.raw_data[:-1000], written.raw_data[:-1000])
        assert not target.raw_data[-1000:].any()
        host.adapter.submit_unlock([key_of(0)])


def bytes_of(size_bytes: int) -> MemoryObjMetadata:
    """The description of a plain string of bytes."""
    return MemoryObjMetadata(
        shape=torch.Size([size_bytes]),
        dtype=torch.uint8,
        address=0,
        phy_size=size_bytes,
        ref_count=1,
        shapes=[torch.Size([size_bytes])],
        dtypes=[torch.uint8],
    )


def test_what_fits_no_tier_fails_at_once() -> None:
    """A store that can never succeed does not wait for room, and is no success."""
    with hosted(tiers_of(None, memory="1MiB")) as host:
        began = time.monotonic()
        result = host.store([key_of(1), key_of(2)], [buffer_of(SIZE, 2), buffer_of(2 << 20, 3)])

        assert not result.is_successful()
        assert time.monotonic() - began < 4
        assert loads_what_was_stored(host, 1, SIZE)
        assert host.look_up([key_of(2)]) == [False]


def test_a_tenant_at_its_quota_pays_with_what_is_its_own(tmp_path: Path) -> None:
    """A cache_salt with a share of a tier cannot push out anybody else, nor after a restart."""
    params = tiers_of(tmp_path, memory=None, disk="4MiB", quotas={"greedy": 0.25})
    with hosted(params) as host:
        assert all(store_some(host, range(20), salt="modest"))
        assert all(store_some(host, range(100, 130), salt="greedy"))
        by_salt = host.adapter.get_usage().bytes_by_cache_salt
        assert by_salt["modest"] == 20 * SIZE
        assert by_salt["greedy"] <= 1 << 20
    with hosted(params) as host:
        host.settle()
        assert all(store_some(host, range(200, 230), salt="greedy"))
        by_salt = host.adapter.get_usage().bytes_by_cache_salt
        assert by_salt["modest"] == 20 * SIZE
        assert by_salt["greedy"] <= 1 << 20


def test_the_head_of_a_sequence_outlives_its_tail() -> None:
    """Stored in pieces, as chunked prefill does it: what is left at the end is a prefix."""
    chain = [key_of(n) for n in range(24)]
    with hosted(tiers_of(None, memory="1MiB")) as host:
        assert host.look_up(chain) == [False] * 24
        for start in range(0, 24, 4):
            piece = range(start, start + 4)
            items = [buffer_of(SIZE, n + 1) for n in piece]
            host.store([chain[n] for n in piece], items)

        found = host.look_up(chain)
        assert found[:12] == [True] * 12
        assert sum(found) == 16


def test_what_nobody_uses_expires() -> None:
    """After `ttl_seconds` an object leaves by itself, and LMCache is told."""
    with hosted(tiers_of(None, CPUMemory={"ttl_seconds": 0.2})) as host:
        assert all(store_some(host, range(3)))
        until(lambda: not host.told.there, "all objects have expired")
        assert_told_exactly(host)
