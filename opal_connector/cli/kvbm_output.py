"""What `opal kvbm` shows: rows as plain facts for `--json`, and the same as tables."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table

from opal_connector.cli.kvbm_verify import VerifyReport
from opal_connector.cli.tiers_output import print_table, size_text
from opal_connector.cluster.group_layout import block_tokens_of, scored_groups
from opal_connector.cluster.ingest.sources import SourceStatus
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.worker_state import OpalWorkerState

Facts = dict[str, Any]


# ---- watch ----


class Rates:
    """Events per second of every worker, from one look to the next.

    Mutable state: the last look; one thread uses it.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._at: float | None = None

    def look(self, kvbm: KVBM, now: float) -> dict[str, float]:
        """The rates since the last look; 0 at the first one."""
        counts = {name: state.event_count for name, state in kvbm.workers.items()}
        seconds = 0.0 if self._at is None else now - self._at
        rates = {
            name: max(0, count - self._counts.get(name, count)) / seconds if seconds else 0.0
            for name, count in counts.items()
        }
        self._counts, self._at = counts, now
        return rates


def cluster_facts(
    kvbm: KVBM, sources: Sequence[SourceStatus], rates: dict[str, float]
) -> list[Facts]:
    """One record per worker, and one per source that has none yet."""
    rows: list[Facts] = []
    for source in sources:
        common = {
            "source": source.name,
            "state": source.state,
            "gaps": source.metrics.gaps,
            "restarts": source.metrics.restarts,
            "purges": source.metrics.purges,
        }
        if not source.worker_ids:
            rows.append({"instance": None, **common, "tiers": []})
        for worker in source.worker_ids:
            state = kvbm.workers.get(worker)
            facts = {} if state is None else _worker_facts(state)
            rate = round(rates.get(worker, 0.0), 1)
            rows.append({"instance": worker, **common, "events_per_second": rate, **facts})
    return rows


def _worker_facts(state: OpalWorkerState) -> Facts:
    started = state.description.incarnation / 1e9
    # An engine of which nobody tells when it began counts its restarts instead.
    age = max(0.0, time.time() - started) if started > 1e9 else None
    facts: Facts = {
        "model": state.description.model,
        "is_live": state.is_live,
        "incarnation": state.description.incarnation,
        "age_seconds": None if age is None else round(age, 1),
        "tiers": _tier_facts(state),
    }
    system = state.system
    if system is not None:
        facts |= {
            "queue_depth": system.queue_depth,
            "running": system.running,
            "waiting": system.waiting,
            "device_usage": system.device_usage,
            "prefill_tokens_per_second": system.prefill_tokens_per_second,
        }
    return facts


def _tier_facts(state: OpalWorkerState) -> list[Facts]:
    blocks: dict[str, int] = {}
    tokens: dict[str, int] = {}  # of one group alone: all groups of a chunk hold the same ones
    description = state.description
    scored = scored_groups(description).groups
    telling = scored[0][0] if scored else 0
    block_tokens = block_tokens_of(description, telling)
    for (group, tier), count in state.block_counts.items():
        blocks[tier] = blocks.get(tier, 0) + count
        tokens[tier] = tokens.get(tier, 0) + count * block_tokens * (group == telling)
    loads = {load.tier: load for load in state.system.tiers} if state.system is not None else {}
    names = [tier.name for tier in description.tiers]
    names += [name for name in (*blocks, *loads) if name not in names]
    rows = []
    chunk_tokens = max(1, description.block_tokens * description.chunk_blocks)
    for name in dict.fromkeys(names):
        load = loads.get(name)
        count = blocks.get(name, 0)
        rows.append(
            {
                "tier": name,
                "blocks": count,
                "chunks": -(-tokens.get(name, 0) // chunk_tokens),
                "used_bytes": None if load is None else load.used_bytes,
                "capacity_bytes": None if load is None else load.capacity_bytes,
            }
        )
    return rows


_INSTANCE_COLUMNS = ("instance", "state", "up", "events/s", "gaps", "run", "wait", "prefill/s")
_TIER_COLUMNS = ("instance", "tier", "blocks", "chunks", "used", "limit")


def watch_tables(rows: Sequence[Facts]) -> Group:
    """A line per instance, and below a line per tier; both fit a terminal of 80 columns."""
    instances = Table(*_INSTANCE_COLUMNS, box=None, pad_edge=False)
    tiers = Table(*_TIER_COLUMNS, box=None, pad_edge=False)
    for row in rows:
        name = row["instance"] or f"({row['source']})"
        keys = ("events_per_second", "gaps", "running", "waiting", "prefill_tokens_per_second")
        numbers = [_number(row.get(key)) for key in keys]
        instances.add_row(name, row["state"], _age(row.get("age_seconds")), *numbers)
        for tier in row["tiers"]:
            counts = [_number(tier[key]) for key in ("blocks", "chunks")]
            sizes = [_size(tier[key]) for key in ("used_bytes", "capacity_bytes")]
            tiers.add_row(name, tier["tier"], *counts, *sizes)
    return Group(instances, "", tiers)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _size(value: int | None) -> str:
    return "-" if value is None else size_text(value)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


# ---- dump ----


def dump_facts(kvbm: KVBM, *, with_blocks: bool) -> list[Facts]:
    """One record per worker, group and tier, if asked for with the blocks and their parents."""
    rows: list[Facts] = []
    for worker, state in sorted(kvbm.workers.items()):
        for (group, tier), count in sorted(state.block_counts.items()):
            row: Facts = {"instance": worker, "group": group, "tier": tier, "blocks": count}
            if with_blocks:
                row["hashes"] = [
                    {"hash": block.hex(), "parent": parent.hex()}
                    for parent, block in sorted(
                        kvbm.contents(worker, group, tier), key=lambda pair: pair[1]
                    )
                ]
            rows.append(row)
    return rows


def print_dump(rows: Sequence[Facts], *, with_blocks: bool) -> None:
    """The records as a table: one line each, or one per block."""
    empty = "No instance holds anything."
    if not with_blocks:
        counts = [
            (one["instance"], str(one["group"]), one["tier"], f"{one['blocks']:,}") for one in rows
        ]
        print_table(("instance", "group", "tier", "blocks"), counts, empty=empty)
        return
    cells = [
        (one["instance"], str(one["group"]), one["tier"], block["hash"], block["parent"])
        for one in rows
        for block in one["hashes"]
    ]
    print_table(("instance", "group", "tier", "block", "parent"), cells, empty=empty)


# ---- match ----


def match_facts(
    matches: dict[str, WorkerMatch], scores: dict[str, float], prompt_tokens: int
) -> Facts:
    """What every worker could serve of a prompt, the best one first."""
    workers = [
        {
            "instance": worker,
            "tokens": match.total_tokens,
            "device_tokens": match.device_tokens,
            "tier_tokens": match.tier_tokens,
            "fraction": round(scores.get(worker, 0.0), 4),
        }
        for worker, match in matches.items()
    ]
    workers.sort(key=lambda one: (-int(str(one["tokens"])), str(one["instance"])))
    return {"prompt_tokens": prompt_tokens, "workers": workers}


def print_match(facts: Facts) -> None:
    """The same as a table."""
    rows = [
        (
            one["instance"],
            f"{one['tokens']:,}",
            f"{one['device_tokens']:,}",
            ", ".join(f"{tier} +{count:,}" for tier, count in one["tier_tokens"].items()) or "-",
            f"{one['fraction']:.0%}",
        )
        for one in facts["workers"]
    ]
    print_table(
        ("instance", "tokens", "device", "behind it", "fraction"),
        rows,
        empty=f"No instance has anything of these {facts['prompt_tokens']:,} tokens.",
    )


# ---- verify ----


def print_verify(report: VerifyReport) -> None:
    """The differences by place, what could not be compared, and a sentence in the end."""
    rows = [
        (
            one.instance_id,
            str(place.group),
            place.tier,
            f"{place.blocks:,}",
            f"{place.missing:,}",
            f"{place.phantom:,}",
            " ".join(name[:16] for name in (*place.missing_hashes, *place.phantom_hashes)),
        )
        for one in report.instances
        for place in one.places
    ]
    columns = ("instance", "group", "tier", "blocks", "missing", "phantom", "first of them")
    print_table(columns, rows, empty="Nothing was compared.")
    for one in report.instances:
        if one.reason:
            print(f"{one.source} ({one.instance_id}) was not compared: {one.reason}.")
    print(
        f"{report.differences:,} differences, {report.not_compared} of {len(report.instances)} "
        "sources not compared."
    )


def verify_facts(report: VerifyReport) -> Facts:
    """The report as one JSON object."""
    facts: Facts = msgspec.to_builtins(report)
    return {"ok": not (report.differences or report.not_compared), **facts}
