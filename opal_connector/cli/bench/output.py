"""The table of `opal bench`, as `vllm bench serve` has it, and where the tokens came from."""

from collections.abc import Iterator
from typing import Final

from opal_connector.cli.bench.summary import BenchSummary, Spread
from opal_connector.config import TIER_NAMES
from opal_connector.simulation import CACHE_MISS, DEVICE

_WIDTH: Final = 58
_LABEL_WIDTH: Final = 42
_FAMILIES: Final = (
    ("Time to First Token", "TTFT", "ttft"),
    ("Time per Output Token (excl. 1st token)", "TPOT", "tpot"),
    ("Inter-token Latency", "ITL", "itl"),
)
_SHORT_TIERS: Final = {
    DEVICE: "GPU",
    **dict(zip(TIER_NAMES, ("CPU", "NVMe", "DFS", "Objects", "Mooncake", "Valkey"), strict=True)),
}


def table(summary: BenchSummary) -> str:
    """All rows that are known; what is not is in the notes below it."""
    return "\n".join(_lines(summary))


def _lines(summary: BenchSummary) -> Iterator[str]:
    yield _rule(" Serving Benchmark Result ", "=")
    yield from _counts(summary)
    for title, short, field in _FAMILIES:
        times: Spread | None = getattr(summary, field)
        if times is not None:
            yield _rule(title, "-")
            yield from _times(short, times)
    if summary.phases:
        yield _rule("Time to First Token by phase", "-")
        for name, times in summary.phases.items():
            yield from _times(f"TTFT, {name}", times)
    if summary.requests_by_worker:
        yield _rule("Requests by instance", "-")
        for name, count in summary.requests_by_worker.items():
            yield _row(name, str(count))
    yield from _tiers(summary)
    yield "=" * _WIDTH
    yield from (f"Note: {note}" for note in summary.notes)


def _counts(summary: BenchSummary) -> Iterator[str]:
    yield _row("Successful requests", str(summary.successful_requests))
    yield _row("Failed requests", str(summary.failed_requests))
    for kind, count in summary.errors.items():
        yield _row(f"  {kind}", str(count))
    if summary.not_sent:
        yield _row("Not sent after a failed turn", str(summary.not_sent))
    yield _row("Benchmark duration (s)", f"{summary.duration_seconds:.2f}")
    if summary.input_tokens is not None:
        yield _row("Total input tokens", str(summary.input_tokens))
    yield _row("Total generated tokens", str(summary.output_tokens))
    yield _row("Request throughput (req/s)", f"{summary.request_throughput:.2f}")
    yield _row("Output token throughput (tok/s)", f"{summary.output_throughput:.2f}")
    yield _row("Peak output token throughput (tok/s)", f"{summary.peak_output_throughput:.2f}")
    yield _row("Peak concurrent requests", str(summary.peak_concurrent_requests))
    if summary.total_throughput is not None:
        yield _row("Total Token throughput (tok/s)", f"{summary.total_throughput:.2f}")
    if summary.held_back is not None:
        yield _row("P99 sent after it was due (ms)", f"{summary.held_back.p99_ms:.2f}")


def _times(name: str, times: Spread) -> Iterator[str]:
    yield _row(f"Mean {name} (ms)", f"{times.mean_ms:.2f}")
    yield _row(f"Median {name} (ms)", f"{times.median_ms:.2f}")
    yield _row(f"P99 {name} (ms)", f"{times.p99_ms:.2f}")


def _tiers(summary: BenchSummary) -> Iterator[str]:
    tokens = summary.tier_tokens
    total = summary.input_tokens
    if tokens is None or not total:
        return
    yield _rule("KVC Tier Token Breakdown", "-")
    for name, count in tokens.items():
        yield _row(f"{name} ({100 * count / total:.2f}%)", str(count))
    fetched = {name: count for name, count in tokens.items() if name != CACHE_MISS}
    places = "->".join(_SHORT_TIERS.get(name, name) for name in fetched)
    yield _rule(f"KVC Tokens Fetched per Tier ({places})", "-")
    for name, count in fetched.items():
        yield _row(f"[{name}] hit rate (%)", f"{100 * count / total:.2f}")
        yield _row(f"[{name}] total tokens fetched", str(count))
        yield _row(f"[{name}] mean tokens/request", f"{count / summary.successful_requests:.1f}")


def _row(label: str, value: str) -> str:
    return f"{label + ':':<{_LABEL_WIDTH}}{value}"


def _rule(title: str, character: str) -> str:
    return title.center(_WIDTH, character)
