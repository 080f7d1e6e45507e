"""The table of `opal simulate`: one column per size and policy."""

from collections.abc import Callable, Sequence
from typing import Final

from opal_connector.cli.tiers_output import print_table, size_text
from opal_connector.simulated_cluster import ClusterReport

Cell = Callable[[ClusterReport], str]
_ROWS: Final[dict[str, Cell]] = {
    "Successful requests": lambda one: str(one.requests),
    "Benchmark duration (s)": lambda one: f"{one.duration_seconds:.1f}",
    "Total input tokens": lambda one: str(one.input_tokens),
    "Hit rate (%)": lambda one: _percent(one.hit_rate),
}
_LATER_ROWS: Final[dict[str, Cell]] = {
    "Mean TTFT (ms)": lambda one: _milliseconds(one, "mean"),
    "Median TTFT (ms)": lambda one: _milliseconds(one, "median"),
    "P95 TTFT (ms)": lambda one: _milliseconds(one, "p95"),
    "P99 TTFT (ms)": lambda one: _milliseconds(one, "p99"),
    "Busiest instance over the mean": lambda one: f"{one.balance.imbalance:.2f}",
    "Requests an instance": lambda one: (
        f"{one.balance.requests_least} to {one.balance.requests_most}"
    ),
    "Idle instances": lambda one: str(one.balance.idle_instances),
    "Event batches": lambda one: str(one.traffic.batches),
    "Events": lambda one: str(one.traffic.events),
    "Event bytes": lambda one: size_text(one.traffic.bytes),
    "Event bytes a request": lambda one: size_text(round(one.traffic.bytes_per_request)),
    "Heartbeat bytes": lambda one: size_text(one.traffic.heartbeat_bytes),
    "Router's index": lambda one: size_text(one.router.index_bytes),
    "Blocks in it": lambda one: str(one.router.index_blocks),
    "Hit rate it expected (%)": lambda one: _percent(one.router.expected_hit_rate),
    "Simulation took (s)": lambda one: f"{one.wall_seconds:.1f}",
    "Requests simulated a second": lambda one: f"{one.requests_per_wall_second:.0f}",
}


def print_clusters(reports: Sequence[ClusterReport]) -> None:
    """Everything that a person compares."""
    cells = dict(_ROWS)
    for name in dict.fromkeys(name for one in reports for name in one.tiers):
        cells[f"  [{name}] hit rate (%)"] = _tier_cell(name)
    cells |= _LATER_ROWS
    rows = [(label, *(cell(one) for one in reports)) for label, cell in cells.items()]
    columns = (f"{one.policy} {one.instances}" for one in reports)
    print_table(("", *columns), rows, empty="")


def _tier_cell(name: str) -> Cell:
    return lambda one: _percent(one.tiers[name].hit_rate)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _milliseconds(report: ClusterReport, key: str) -> str:
    return f"{1000 * report.ttft_seconds[key]:.1f}"
