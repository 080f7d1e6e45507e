"""Opal's numbers in vLLM's log line and on its /metrics."""

import functools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes import done, make_manager, plan, start

pytest.importorskip("vllm")
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from opal_connector.integrations.vllm.stats import OpalPromMetrics, OpalStats
from opal_connector.managers.counters import BookCounters

pytestmark = pytest.mark.vllm

DATA: dict[str, dict[str, int | float]] = {
    "hit_tokens": {"CPUMemory": 300},
    "miss_tokens": {"CPUMemory": 100},
    "load_bytes": {"CPUMemory": 3_000_000},
    "load_seconds": {"CPUMemory": 0.5},
    "store_bytes": {"CPUMemory": 1_000_000},
    "store_seconds": {"CPUMemory": 0.25},
    "evictions": {"CPUMemory": 4},
    "dropped_stores": {"full": 2, "in_flight": 1},
    "failures": {"checksum": 1, "io": 2},
    "capacity_bytes": {"CPUMemory": 1000},
    "used_bytes": {"CPUMemory": 250},
}


def copy(data: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(values) for name, values in data.items()}


# The log line.


def test_log_line_says_what_a_person_asks() -> None:
    """Hits per tier and their rate, volume and speed, what was lost, how full the tier is."""
    assert OpalStats(copy(DATA)).reduce() == {
        "CPUMemory hit tokens": 300,
        "hit rate %": 75.0,
        "load MB": 3.0,
        "load GB/s": 0.01,
        "store MB": 1.0,
        "store GB/s": 0.0,
        "evictions": 4,
        "dropped stores": 3,
        "failures": 3,
        "CPUMemory used %": 25.0,
    }


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, {}),
        ({"miss_tokens": {"CPUMemory": 50}}, {"hit rate %": 0.0}),
        ({"miss_tokens": {}}, {}),
        ({"hit_tokens": {"CPUMemory": 50}}, {"CPUMemory hit tokens": 50, "hit rate %": 100.0}),
        (
            {"hit_tokens": {"A": 40, "B": 60}, "miss_tokens": {"A": 60}},
            {"A hit tokens": 40, "B hit tokens": 60, "hit rate %": 100.0},
        ),
        (
            {"hit_tokens": {"B": 30}, "miss_tokens": {"A": 100, "B": 70}},
            {"B hit tokens": 30, "hit rate %": 30.0},
        ),
        ({"load_bytes": {"CPUMemory": 10**9}}, {"load MB": 1000.0, "load GB/s": 1e9}),
        ({"capacity_bytes": {"CPUMemory": 0}}, {"CPUMemory used %": 0.0}),
    ],
)
def test_log_line_of_little(data: dict[str, Any], line: dict[str, float]) -> None:
    """A quiet interval, the first one, or one with a single number never raises."""
    assert OpalStats(data).reduce() == line


def test_intervals_add_up_and_levels_do_not() -> None:
    """Counters of two intervals sum; of a gauge the later value counts."""
    stats = OpalStats(copy(DATA))
    more = copy(DATA)
    more["used_bytes"] = {"CPUMemory": 750}
    more["failures"] = {"io": 1, "missing": 5}

    total = stats.aggregate(OpalStats(more))

    assert total is stats
    assert total.data["hit_tokens"] == {"CPUMemory": 600}
    assert total.data["failures"] == {"checksum": 1, "io": 3, "missing": 5}
    assert total.data["used_bytes"] == {"CPUMemory": 750}
    assert total.data["capacity_bytes"] == {"CPUMemory": 1000}
    assert more["hit_tokens"] == {"CPUMemory": 300}, "what was added is not changed"


def test_nothing_is_empty_and_can_be_filled() -> None:
    """VLLM resets and fills one object over and over."""
    stats = OpalStats()
    assert stats.is_empty()
    stats.aggregate(OpalStats(copy(DATA)))
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    assert OpalStats().is_empty(), "no default is shared"


def test_stats_survive_the_way_to_the_front_end() -> None:
    """VLLM sends the data as a plain dictionary between processes."""
    sent = msgspec.msgpack.encode(OpalStats(copy(DATA)).to_dict())

    assert OpalStats(msgspec.msgpack.decode(sent)) == OpalStats(copy(DATA))


# Prometheus.


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> OpalPromMetrics:
    """The metrics of two engines, in a registry of their own."""
    types = {
        kind: functools.partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)
    }
    return OpalPromMetrics(
        SimpleNamespace(kv_transfer_config=None),  # type: ignore[arg-type]
        types,  # type: ignore[arg-type]
        ["model_name", "engine"],
        {0: ["m", "0"], 1: ["m", "1"]},
    )


def value(registry: CollectorRegistry, name: str, engine: str = "0", **labels: str) -> float | None:
    return registry.get_sample_value(
        f"vllm:opal_{name}", {"model_name": "m", "engine": engine, **labels}
    )


def test_every_number_is_on_metrics(registry: CollectorRegistry, metrics: OpalPromMetrics) -> None:
    """Hits and misses in tokens, bytes and seconds, evictions, drops and failures by kind."""
    metrics.observe(copy(DATA))

    for kind, tier_value in (
        ("hit_tokens", 300),
        ("miss_tokens", 100),
        ("load_bytes", 3e6),
        ("load_seconds", 0.5),
        ("store_bytes", 1e6),
        ("store_seconds", 0.25),
        ("evictions", 4),
    ):
        assert value(registry, f"{kind}_total", tier="CPUMemory") == tier_value
    assert value(registry, "dropped_stores_total", reason="full") == 2
    assert value(registry, "dropped_stores_total", reason="in_flight") == 1
    assert value(registry, "failures_total", kind="checksum") == 1
    assert value(registry, "capacity_bytes", tier="CPUMemory") == 1000
    assert value(registry, "used_bytes", tier="CPUMemory") == 250


def test_counters_count_and_gauges_follow(
    registry: CollectorRegistry, metrics: OpalPromMetrics
) -> None:
    """Two intervals: increments add, levels are the last."""
    metrics.observe(copy(DATA))
    metrics.observe({"hit_tokens": {"CPUMemory": 5}, "used_bytes": {"CPUMemory": 1}})

    assert value(registry, "hit_tokens_total", tier="CPUMemory") == 305
    assert value(registry, "used_bytes", tier="CPUMemory") == 1


def test_engines_are_apart(registry: CollectorRegistry, metrics: OpalPromMetrics) -> None:
    """Data parallel engines have their own label."""
    metrics.observe(copy(DATA), engine_idx=1)

    assert value(registry, "hit_tokens_total", "1", tier="CPUMemory") == 300
    assert value(registry, "hit_tokens_total", "0", tier="CPUMemory") is None


def test_number_of_a_newer_engine_is_ignored(
    registry: CollectorRegistry, metrics: OpalPromMetrics
) -> None:
    """A front end that does not know a field still serves the others."""
    metrics.observe({"unheard_of": {"x": 1}, "hit_tokens": {"CPUMemory": 5}})

    assert value(registry, "hit_tokens_total", tier="CPUMemory") == 5


def test_every_counter_of_the_books_has_a_metric(
    registry: CollectorRegistry, metrics: OpalPromMetrics
) -> None:
    """A counter that is added to the books appears on /metrics, or this fails."""
    known = set(metrics._counters)

    assert set(BookCounters.__struct_fields__) | {"evictions"} == known


def test_counters_of_the_books_can_be_observed(
    registry: CollectorRegistry, metrics: OpalPromMetrics
) -> None:
    """From a store that was made to the number that a person scrapes."""
    manager = make_manager(rows=4)
    manager.commit(done(plan(manager, start(manager, range(4))), moved={0: (96, 0.5)}))
    manager.commit(done(plan(manager, start(manager, range(10, 14))), moved={0: (96, 0.5)}))
    manager.count_admission({"CPUMemory": 4}, 6)

    metrics.observe(manager.take_counters())

    assert value(registry, "store_bytes_total", tier="CPUMemory") == 192
    assert value(registry, "evictions_total", tier="CPUMemory") == 2
    assert value(registry, "hit_tokens_total", tier="CPUMemory") == 4
    assert value(registry, "miss_tokens_total", tier="CPUMemory") == 2
