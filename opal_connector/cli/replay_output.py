"""The table of `opal replay`: one column per policy, the rows named as Opal names them."""

from collections.abc import Callable, Container, Sequence
from typing import Final

from opal_connector.cli.tiers_output import print_table, size_text
from opal_connector.simulation import BELADY, CACHE_MISS, DEVICE, ReplayReport, TierReport

_NONE: Final = "-"
Cell = Callable[[TierReport], str]
Rows = list[tuple[str, ...]]
_TTFT_ROWS: Final = {
    "mean": "Mean TTFT (ms)",
    "median": "Median TTFT (ms)",
    "p95": "P95 TTFT (ms)",
    "p99": "P99 TTFT (ms)",
}
_TIER_ROWS: Final[dict[str, Cell]] = {
    "hit rate (%)": lambda tier: f"{100 * tier.hit_rate:.2f}",
    "total tokens fetched": lambda tier: str(tier.hit_tokens),
    "mean tokens/request": lambda tier: f"{tier.mean_tokens_per_request:.1f}",
}
_MOVED_ROWS: Final[dict[str, Cell]] = {
    "capacity": lambda tier: size_text(tier.capacity_bytes),
    "bytes read": lambda tier: size_text(tier.read_bytes),
    "bytes written": lambda tier: size_text(tier.written_bytes),
    "writes per unique chunk": lambda tier: f"{tier.writes_per_unique_chunk:.3f}",
    "evictions": lambda tier: str(tier.evictions),
}


def print_reports(reports: Sequence[ReplayReport]) -> None:
    """Everything that a person compares."""
    rows: Rows = []
    _add(rows, "Successful requests", [str(one.requests) for one in reports])
    _add(rows, "Benchmark duration (s)", [_some(one.duration_seconds) for one in reports])
    _add(rows, "Total input tokens", [str(one.input_tokens) for one in reports])
    _add(rows, "Total generated tokens", [str(one.output_tokens) for one in reports])
    for key, label in _TTFT_ROWS.items():
        values = [one.ttft_seconds.get(key) for one in reports]
        _add(rows, label, [_NONE if value is None else f"{1000 * value:.1f}" for value in values])
    _title(rows, "KVC Tier Token Breakdown", reports)
    for source in _sources(reports):
        _add(rows, f"  {source}", [_share(one, source) for one in reports])
    _title(rows, "KVC Tokens Fetched per Tier", reports)
    _add_tiers(rows, reports, _TIER_ROWS, ())
    if any(one.events for one in reports):
        _title(rows, "Bytes moved", reports)
        _add_tiers(rows, reports, _MOVED_ROWS, {DEVICE, BELADY})
        _title(rows, "Events", reports)
        for kind in ("INSERT", "DELETE", "MOVE", "COPY"):
            _add(rows, f"  {kind}", [str(one.events.get(kind, _NONE)) for one in reports])
    for reason in dict.fromkeys(reason for one in reports for reason in one.dropped_stores):
        counts = [str(one.dropped_stores.get(reason, 0)) for one in reports]
        _add(rows, f"Dropped stores ({reason})", counts)
    _add(rows, "Replay took (s)", [f"{one.replay_seconds:.1f}" for one in reports])
    print_table(("", *(one.policy for one in reports)), rows, empty="")


def _add(rows: Rows, label: str, cells: Sequence[str]) -> None:
    rows.append((label, *cells))


def _title(rows: Rows, label: str, reports: Sequence[ReplayReport]) -> None:
    rows.append((label, *("" for _ in reports)))


def _add_tiers(
    rows: Rows, reports: Sequence[ReplayReport], cells: dict[str, Cell], without: Container[str]
) -> None:
    for name in dict.fromkeys(name for one in reports for name in one.tiers):
        if name in without:
            continue
        tiers = [one.tiers.get(name) for one in reports]
        for label, cell in cells.items():
            values = [_NONE if tier is None else cell(tier) for tier in tiers]
            _add(rows, f"  [{name}] {label}", values)


def _sources(reports: Sequence[ReplayReport]) -> list[str]:
    """Where tokens came from, in any column, the cache misses last."""
    names = dict.fromkeys(name for one in reports for name in one.tier_tokens)
    return [name for name in names if name != CACHE_MISS] + [CACHE_MISS]


def _share(report: ReplayReport, name: str) -> str:
    tokens = report.tier_tokens.get(name)
    if tokens is None:
        return _NONE
    return f"{tokens} ({100 * tokens / report.input_tokens:.2f}%)"


def _some(value: float) -> str:
    return f"{value:.1f}" if value else _NONE
