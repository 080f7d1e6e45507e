"""The router's figures for Prometheus, read from the books when somebody asks."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from opal_connector.cluster.router.core import RouterCore

_PREFIX = "opal_router_"
Rows = Iterable[tuple[tuple[str, ...], float]]


class RouterCollector:
    """Reads a router's books. It keeps nothing of its own."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """All figures as they are now."""
        yield from self._requests()
        yield from self._instances()
        yield from self._audit()
        yield from self._index()

    def _requests(self) -> Iterator[Metric]:
        core = self._core
        forwarder, admission = core.forwarder, core.admission
        by_event: dict[str, list[tuple[tuple[str, ...], float]]] = {}
        for (event, detail), count in forwarder.counts.items():
            by_event.setdefault(event, []).append(((detail,), count))
        yield _counter("answers", "Answers by status.", ("status",), by_event.get("answer", ()))
        yield _counter(
            "retries", "Attempts that went elsewhere.", ("why",), by_event.get("retry", ())
        )
        yield _counter("broken", "Attempts that broke.", ("kind",), by_event.get("broken", ()))
        yield _counter(
            "truncated", "Answers that broke off.", ("kind",), by_event.get("truncated", ())
        )
        yield _counter("prompts", "Prompts by tokens.", ("tokens",), by_event.get("tokens", ()))
        yield _counter(
            "tokenize",
            "Prompts that an engine was to split.",
            ("how",),
            (((how,), count) for how, count in core.engine_tokens.counts.items()),
        )
        yield _counter(
            "refused",
            "Requests that were not taken.",
            ("why",),
            (((why,), count) for why, count in admission.counts.items()),
        )
        yield _counter("decisions", "Placements.", ("reason", "worker"), admission.reasons.items())
        yield _gauge("waiting", "Requests that wait for room.", (), [((), admission.waiting)])
        yield _gauge("under_way", "Requests under way.", (), [((), forwarder.under_way)])
        for name, text, found in (
            (
                "first_byte_seconds",
                "From a request to its first byte.",
                forwarder.first_byte_seconds,
            ),
            ("placement_seconds", "From a request to where it goes.", forwarder.overhead_seconds),
        ):
            family = HistogramMetricFamily(_PREFIX + name, text)
            family.add_metric([], found.buckets(), found.sum)
            yield family

    def _instances(self) -> Iterator[Metric]:
        now = time.monotonic()
        fleet = list(self._core.fleet)
        yield _gauge(
            "instance_takes_requests",
            "Whether an instance takes requests.",
            ("instance",),
            (((one.name,), float(one.is_well(now))) for one in fleet),
        )
        yield _gauge(
            "instance_state",
            "An instance's health and breaker; 1 for those it has.",
            ("instance", "health", "breaker"),
            (((one.name, one.health.value, one.breaker.state(now).value), 1.0) for one in fleet),
        )
        yield _gauge(
            "in_flight",
            "Requests at an instance.",
            ("instance",),
            (((one.name,), one.in_flight) for one in fleet),
        )
        yield _counter(
            "breaker_opened",
            "Times that a breaker opened.",
            ("instance",),
            (((one.name,), one.breaker.opened) for one in fleet),
        )
        yield _counter("deaths", "Instances that died.", (), [((), self._core.deaths)])
        yield _counter(
            "forgotten_blocks",
            "Blocks forgotten because an instance died.",
            (),
            [((), self._core.forgotten_blocks)],
        )

    def _audit(self) -> Iterator[Metric]:
        audit = self._core.audit
        workers = list(audit.workers.items())
        for name, text in (
            ("requests", "Requests whose cached tokens are known."),
            ("expected_tokens", "Tokens that should have been cached."),
            ("actual_tokens", "Tokens that were cached."),
            ("prompt_tokens", "Tokens of these prompts."),
            ("resyncs", "Comparisons that were asked for."),
        ):
            rows = [((worker,), getattr(found, name)) for worker, found in workers]
            yield _counter(f"audit_{name}", text, ("worker",), rows)
        yield _gauge(
            "audit_trust",
            "Moving average of cached over expected tokens.",
            ("worker",),
            (((worker,), found.trust) for worker, found in workers),
        )
        yield _gauge(
            "events_match",
            "Whether a worker announces the blocks of the prompts that it answered.",
            ("worker",),
            (
                ((worker,), float(check.matches))
                for worker, check in self._core.event_check.workers.items()
                if check.matches is not None
            ),
        )
        yield _gauge(
            "tokenizer_given_up",
            "Tokenizers that do not split prompts as the engine does.",
            ("model", "kind"),
            ((kind, 1.0) for kind in self._core.local_tokens.given_up),
        )
        yield _counter("audit_uncounted", "Answers that do not say.", (), [((), audit.uncounted)])
        family = HistogramMetricFamily(
            _PREFIX + "audit_difference_tokens", "Cached minus expected tokens.", labels=["worker"]
        )
        for worker, found in workers:
            family.add_metric([worker], found.differences.buckets(), found.differences.sum)
        yield family

    def _index(self) -> Iterator[Metric]:
        index = self._core.index
        yield _gauge("index_blocks", "Distinct blocks.", (), [((), index.entry_count)])
        yield _gauge("index_bytes", "Memory of the index.", (), [((), index.used_bytes)])
        held: dict[tuple[str, ...], float] = {}
        for worker_id, state in index.workers.items():
            for (_, tier), count in state.block_counts.items():
                held[worker_id, tier] = held.get((worker_id, tier), 0) + count
        yield _gauge("worker_blocks", "Blocks of a worker.", ("worker", "tier"), held.items())
        statuses = self._core.sources.feed.statuses()
        yield _gauge(
            "source_state",
            "The state of a source of events; 1 for the one it has.",
            ("source", "state"),
            (((one.name, one.state.value), 1.0) for one in statuses),
        )
        for name in ("events", "gaps", "snapshots", "digest_mismatches", "purges", "restarts"):
            rows = [((one.name,), float(getattr(one.metrics, name))) for one in statuses]
            yield _counter(f"source_{name}", f"{name} of a source.", ("source",), rows)


def exposition(core: RouterCore) -> bytes:
    """All figures as text."""
    registry = CollectorRegistry()
    for collector in (RouterCollector(core), *core.collectors):
        registry.register(collector)
    text: bytes = generate_latest(registry)
    return text


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=labels)
    for values, count in rows:
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
