"""Who may have whose objects."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

import torch
from l2_world import (
    SIZE,
    buffer_of,
    hosted,
    key_of,
    layout_of,
    loads_what_was_stored,
    store_some,
    tiers_of,
    until,
)


def test_another_layout_is_another_object() -> None:
    """LMCache's key has no dtype: engines that differ in it never see each other's bytes."""
    half, whole = buffer_of(SIZE, 1), buffer_of(SIZE, 1, dtype=torch.float32)
    with hosted(tiers_of(None)) as host:
        host.store([key_of(0)], [half])

        assert host.look_up([key_of(0)], layout_of(whole)) == [False]
        assert host.look_up([key_of(0)], layout_of(half)) == [True]
        target = buffer_of(SIZE, dtype=torch.float32)
        assert host.load([key_of(0)], [target]) == [False]
        assert not target.raw_data.any()

        host.store([key_of(0)], [whole])
        assert host.look_up([key_of(0)], layout_of(whole)) == [True]
        assert host.told.there == {key_of(0): SIZE}
        assert host.adapter.get_usage().total_bytes_used == 2 * SIZE


@pytest.mark.parametrize("other", [{"model": "other"}, {"rank": 1}, {"salt": "tenant"}])
def test_other_keys_of_the_same_chunk_are_other_objects(other: dict[str, Any]) -> None:
    """Model, rank and tenant are part of the name."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(1))
        assert host.look_up([key_of(0, **other)]) == [False]
        assert not loads_what_was_stored(host, 0, SIZE, **other)


def test_namespaces_keep_servers_apart_in_one_directory(tmp_path: Path) -> None:
    """For what LMCache's keys do not tell: another adapter, other weights."""
    with hosted(tiers_of(tmp_path, memory=None, namespace="lora-a")) as host:
        store_some(host, range(1))
    with hosted(tiers_of(tmp_path, memory=None, namespace="lora-b")) as host:
        assert host.look_up([key_of(0)]) == [False]
    with hosted(tiers_of(tmp_path, memory=None, namespace="lora-a")) as host:
        assert host.look_up([key_of(0)]) == [True]


def test_servers_find_each_others_objects_in_a_shared_directory(tmp_path: Path) -> None:
    """A lookup asks the directory for what it does not know, and knows whose context it is."""
    params = {
        "kvc_tiers": ["DistributedFS"],
        "DistributedFS": {
            "path": str(tmp_path),
            "capacity_GB": "64MiB",
            "lookup_timeout_seconds": 5,
            "refresh_seconds": 3600,
        },
    }
    with hosted(params) as writer, hosted(params) as reader:
        layouts = layout_of(buffer_of(SIZE))
        assert reader.look_up([key_of(0)], layouts) == [False]
        assert all(store_some(writer, range(2)))

        assert reader.look_up([key_of(0), key_of(5)], layouts) == [True, False]
        assert loads_what_was_stored(reader, 0, SIZE)
        assert reader.told.there == {key_of(0): SIZE}


def test_contexts_of_others_are_learned_while_running(tmp_path: Path) -> None:
    """A tenant that only another server knows: its objects are found by a refresh."""
    params = {
        "kvc_tiers": ["DistributedFS"],
        "DistributedFS": {"path": str(tmp_path), "capacity_GB": "64MiB", "refresh_seconds": 0.2},
    }
    with hosted(params) as writer, hosted(params) as reader:
        assert reader.look_up([key_of(0)]) == [False]
        assert all(store_some(writer, range(1), salt="tenant"))
        until(lambda: key_of(0, salt="tenant") in reader.told.there, "it is found")
        assert loads_what_was_stored(reader, 0, SIZE, salt="tenant")
