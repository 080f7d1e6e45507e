"""Opal's numbers in vLLM's log line and on vLLM's /metrics."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from opal_connector.managers import OpalStorageBackend
from opal_connector.transfers import TierHealth

GAUGES = ("capacity_bytes", "used_bytes", "tier_health")


_HEALTH_LEVELS = {
    TierHealth.OK: 0,
    TierHealth.NO_SPACE: 1,
    TierHealth.OPENING: 2,
    TierHealth.SUSPENDED: 3,
}


def levels(tiers: Iterable[OpalStorageBackend]) -> dict[str, dict[str, int]]:
    """The gauges as they are now."""
    tiers = list(tiers)
    return {
        "capacity_bytes": {tier.tier: tier.capacity_bytes for tier in tiers},
        "used_bytes": {tier.tier: tier.used_bytes for tier in tiers},
        "tier_health": {tier.tier: _HEALTH_LEVELS[tier.health] for tier in tiers},
    }


@dataclass
class OpalStats(KVConnectorStats):
    """Increments and levels of one interval: field name to label to number.

    `data` holds the fields of `BookCounters`, `evictions`, and the gauges of `GAUGES`.
    """

    data: dict[str, dict[str, int | float]] = field(default_factory=dict)

    @override
    def reset(self) -> None:
        self.data = {}

    @override
    def aggregate(self, other: KVConnectorStats) -> "OpalStats":
        for name, values in other.data.items():
            mine = self.data.setdefault(name, {})
            for label, amount in values.items():
                mine[label] = amount if name in GAUGES else mine.get(label, 0) + amount
        return self

    @override
    def reduce(self) -> dict[str, int | float]:
        hits = self.data.get("hit_tokens", {})
        misses = self.data.get("miss_tokens", {})
        reduced: dict[str, int | float] = {
            f"{tier} hit tokens": amount for tier, amount in hits.items()
        }
        # The first tier is asked for everything, the others for what is left.
        asked = max(
            (hits.get(tier, 0) + misses.get(tier, 0) for tier in {*hits, *misses}), default=0
        )
        if asked:
            reduced["hit rate %"] = round(100 * sum(hits.values()) / asked, 1)
        for verb in ("load", "store"):
            moved = sum(self.data.get(f"{verb}_bytes", {}).values())
            seconds = sum(self.data.get(f"{verb}_seconds", {}).values())
            if moved:
                reduced[f"{verb} MB"] = round(moved / 1e6, 1)
                reduced[f"{verb} GB/s"] = round(moved / 1e9 / max(seconds, 1e-9), 2)
        for name in ("evictions", "dropped_stores", "failures"):
            amount = sum(self.data.get(name, {}).values())
            if amount:
                reduced[name.replace("_", " ")] = amount
        for tier, capacity in self.data.get("capacity_bytes", {}).items():
            used = self.data.get("used_bytes", {}).get(tier, 0)
            reduced[f"{tier} used %"] = round(100 * used / max(1, capacity), 1)
        return reduced

    @override
    def is_empty(self) -> bool:
        return not self.data


# field of OpalStats.data -> metric, label, help
_COUNTERS = {
    "hit_tokens": ("vllm:opal_hit_tokens", "tier", "Prompt tokens served from a tier."),
    "miss_tokens": (
        "vllm:opal_miss_tokens",
        "tier",
        "Prompt tokens that a tier was asked for and did not have.",
    ),
    "load_bytes": ("vllm:opal_load_bytes", "tier", "Bytes loaded from a tier."),
    "load_seconds": ("vllm:opal_load_seconds", "tier", "Thread seconds of loads from a tier."),
    "store_bytes": ("vllm:opal_store_bytes", "tier", "Bytes stored to a tier."),
    "store_seconds": ("vllm:opal_store_seconds", "tier", "Thread seconds of stores to a tier."),
    "evictions": ("vllm:opal_evictions", "tier", "Objects evicted from a tier."),
    "dropped_stores": ("vllm:opal_dropped_stores", "reason", "Stores that were not made."),
    "failures": ("vllm:opal_failures", "kind", "Objects that could not be moved."),
}
_GAUGES = {
    "capacity_bytes": ("vllm:opal_capacity_bytes", "tier", "Limit of a tier, per worker."),
    "used_bytes": ("vllm:opal_used_bytes", "tier", "Bytes in use in a tier, per worker."),
    "tier_health": (
        "vllm:opal_tier_health",
        "tier",
        "0 well, 1 full and only loading, 2 opening, 3 suspended.",
    ),
}


class OpalPromMetrics(KVConnectorPromMetrics):
    """Feeds `OpalStats` into Prometheus, in the front-end process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            kind: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, label])
            for kind, (name, label, text) in _COUNTERS.items()
        }
        self._gauges = {
            kind: self._gauge_cls(name=name, documentation=text, labelnames=[*labelnames, label])
            for kind, (name, label, text) in _GAUGES.items()
        }

    @override
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for kind, values in transfer_stats_data.items():
            for label, amount in values.items():
                if kind in self._counters:
                    self._counters[kind].labels(*engine_labels, label).inc(amount)
                elif kind in self._gauges:
                    self._gauges[kind].labels(*engine_labels, label).set(amount)
