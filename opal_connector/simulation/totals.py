"""What the instances of a run have done together."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from opal_connector.simulation.books import chunk_blocks
from opal_connector.simulation.directory import SimulatedDirectory
from opal_connector.simulation.instance import SimulatedInstance
from opal_connector.simulation.report import CACHE_MISS, TierReport
from opal_connector.simulation.run import TraceRun


class Totals(msgspec.Struct, kw_only=True):
    """Sums over instances, under the names of the reports."""

    unique_chunks: int
    tier_tokens: dict[str, int]
    hit_rate: float
    tiers: dict[str, TierReport]
    events: dict[str, int]
    dropped_stores: dict[str, int]


def totals(
    run: TraceRun,
    instances: Sequence[SimulatedInstance],
    *,
    instance_count: int = 1,
    directory: SimulatedDirectory | None = None,
) -> Totals:
    """Add up what `instances` did, all that were ever needed of `instance_count`.

    `directory` is the one that all of them mount.
    """
    counters = [instance.manager.take_counters() for instance in instances]
    evictions: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for taken, instance in zip(counters, instances, strict=True):
        evictions.update({name: int(count) for name, count in taken.get("evictions", {}).items()})
        dropped.update({why: int(count) for why, count in taken.get("dropped_stores", {}).items()})
        events.update(instance.ledger.counts)
    input_tokens = run.trace.input_tokens
    unique_chunks = run.trace.unique_chunks(chunk_blocks(run.settings, run.trace.block_tokens))
    reports = {name: _hits(run, name) for name in run.tokens}
    for instance in instances:
        _add(reports, instance)
    for tier in instances[0].manager.storage.tiers:
        report = reports[tier.tier]
        report.capacity_bytes = instance_count * tier.capacity_bytes
        report.evictions += evictions[tier.tier]
        if directory is not None and tier.space.is_shared:
            _count_once(report, directory, tier.capacity_bytes)
    for report in reports.values():
        report.writes_per_unique_chunk = report.written_objects / max(1, unique_chunks)
    hit_tokens = sum(run.hit_tokens)
    return Totals(
        unique_chunks=unique_chunks,
        tier_tokens={**run.tokens, CACHE_MISS: input_tokens - hit_tokens},
        hit_rate=hit_tokens / input_tokens,
        tiers=reports,
        events=dict(events),
        dropped_stores=dict(dropped),
    )


def _hits(run: TraceRun, name: str) -> TierReport:
    tokens = run.tokens[name]
    return TierReport(
        hit_tokens=tokens,
        hit_rate=tokens / run.trace.input_tokens,
        mean_tokens_per_request=tokens / len(run.trace.requests),
    )


def _add(reports: dict[str, TierReport], instance: SimulatedInstance) -> None:
    for tier, traffic in zip(instance.manager.storage.tiers, instance.worker.traffic, strict=True):
        report = reports[tier.tier]
        report.used_bytes += tier.used_bytes
        report.objects += len(tier)
        report.read_bytes += traffic.read_bytes
        report.written_bytes += traffic.written_bytes
        report.written_objects += traffic.written_objects
    if instance.keeper is not None:
        reports[instance.keeper.tier].evictions += instance.keeper.directory.removed_count


def _count_once(report: TierReport, directory: SimulatedDirectory, capacity_bytes: int) -> None:
    """What all mount is there once, however many know of it."""
    report.used_bytes = directory.used_bytes
    report.objects = len(directory)
    report.capacity_bytes = capacity_bytes
    report.evictions -= (len(directory.keepers) - 1) * directory.removed_count
