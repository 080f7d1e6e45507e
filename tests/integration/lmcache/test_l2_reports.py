"""What LMCache and its operators are told."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import SIZE, Params, Told, hosted, key_of, store_some, tiers_of
from lmcache.v1.mp_observability.event import EventType

from opal_connector.config import ConfigError
from opal_connector.integrations.lmcache.l2_adapter import OpalL2Adapter


def test_the_backend_is_called_opal(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache calls every plugin "plugin"; pools and events are told apart by this name."""
    with hosted(tiers_of(None)) as host:
        events: list[Any] = []
        monkeypatch.setattr(host.adapter._event_bus, "publish", events.append)
        host.adapter.set_backend_identity("plugin", shared=True)
        store_some(host, range(1))
        host.adapter.delete([key_of(0)])
        kinds = [event.event_type for event in events]
        assert kinds == [EventType.L2_KEYS_STORED, EventType.L2_KEYS_DELETED]
        assert {event.metadata["backend"] for event in events} == {"opal"}
        assert all(event.metadata["shared"] for event in events)


def test_who_begins_to_listen_is_told_what_is_there(tmp_path: Path) -> None:
    """LMCache's listeners come after the adapter, and after a restart it is full already."""
    params = tiers_of(tmp_path, memory=None)
    with hosted(params) as host:
        store_some(host, range(3))
    with hosted(params) as host:
        assert host.look_up([key_of(0)]) == [True]
        late = Told()
        host.adapter.register_listener(late)
        assert late.there == host.told.there == {key_of(n): SIZE for n in range(3)}
        store_some(host, range(3, 5))
        host.adapter.delete([key_of(1), key_of(4)])
        assert late.there == host.told.there == {key_of(n): SIZE for n in (0, 2, 3)}
        assert not late.wrong


def test_lmcache_does_not_evict_besides() -> None:
    """It is told the capacity and the use, and that global eviction is none of its business."""
    with hosted(tiers_of(None, memory="1MiB")) as host:
        assert not host.adapter.supports_global_eviction
        store_some(host, range(4))
        usage = host.adapter.get_usage()
        assert (usage.total_bytes_used, usage.total_capacity_bytes) == (4 * SIZE, 1 << 20)


def test_a_listing_in_pages_is_complete() -> None:
    """Every key once, whatever the size of the pages; a cursor that is none is refused."""
    with hosted(tiers_of(None)) as host:
        store_some(host, range(7))
        store_some(host, range(7, 9), model="other")
        seen, cursor = [], None
        while True:
            page = host.adapter.list_l2_keys("model", page_size=3, cursor=cursor)
            seen += [entry.key.chunk_hash_hex for entry in page.entries]
            cursor = page.next_page_token
            if cursor is None:
                break
        assert sorted(seen) == sorted(key_of(n).chunk_hash.hex() for n in range(7))
        for wrong in ({"page_size": 0}, {"cursor": "x"}, {"cursor": "00"}):
            with pytest.raises(ValueError, match="found"):
                host.adapter.list_l2_keys(**wrong)


def test_the_status_names_every_tier(tmp_path: Path) -> None:
    """Health, room and counts by tier, and that somebody looks after the tasks."""
    with hosted(tiers_of(tmp_path)) as host:
        store_some(host, range(2))
        host.settle()
        status = host.adapter.report_status()
        assert status["is_healthy"]
        assert status["backend"] == "opal"
        assert [tier["tier"] for tier in status["tiers"]] == ["CPUMemory", "LocalNVMe"]
        assert [tier["health"] for tier in status["tiers"]] == ["ok", "ok"]
        assert [tier["object_count"] for tier in status["tiers"]] == [2, 2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"kvc_tier": ["CPUMemory"]}, "kvc_tier: unknown field; allowed here: kvc_tiers, "),
        ({"kvc_tiers": ["Disk"]}, r"kvc_tiers\[0\]: found 'Disk', allowed: CPUMemory, "),
        (
            {"kvc_tiers": ["CPUMemory", "Valkey"]},
            r"kvc_tiers\[1\]: found 'Valkey', allowed: CPUMemory, ",
        ),
        ({"kvc_tiers": []}, "kvc_tiers: found none, allowed: "),
        ({"CPUMemory": {"capacity": 1}}, "CPUMemory.capacity: unknown field; allowed here: "),
        ({"CPUMemory": {"eviction_policy": "MRU"}}, "CPUMemory.eviction_policy: found 'MRU'"),
        ({"kvc_tiers": ["LocalNVMe"]}, "LocalNVMe.path: found None, allowed: "),
        ({"quotas": {"a": 2.0}}, "quotas.a: found 2.0, allowed: "),
        ({"chunk_size": 256}, "chunk_size: unknown field"),
        ({"namespace": "n" * 200}, "namespace: found 200 characters, allowed: 128"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_field(params: Params, message: str) -> None:
    """The server does not start, and says what to change."""
    with pytest.raises(ConfigError, match=message) as caught:
        OpalL2Adapter(params)
    assert "\n" not in str(caught.value)


def test_telemetry_is_off() -> None:
    """No test here sends anything to anybody."""
    assert os.environ["LMCACHE_TRACK_USAGE"] == "false"
    assert Told().wrong == []
