"""The figures of a benchmark from its records: every one counted by hand here."""

from typing import Any

import msgspec
import pytest

from opal_connector.cli.bench import BenchResult, RequestRecord
from opal_connector.cli.bench.output import table
from opal_connector.cli.bench.summary import (
    Spread,
    peak_concurrent,
    peak_per_second,
    percentile,
    spread,
    summarize,
)


def record(sent: float, tokens: list[float], **more: Any) -> RequestRecord:
    """A request of 100 tokens whose answer's pieces came at these times after it was sent."""
    given: dict[str, Any] = {
        "conversation_id": "c",
        "turn": 0,
        "sent_seconds": sent,
        "due_seconds": sent,
        "token_seconds": tokens,
        "latency_seconds": tokens[-1] if tokens else 0.0,
        "prompt_tokens": 100,
        "output_tokens": len(tokens),
        "is_usage_reported": True,
    }
    return RequestRecord(**{**given, **more})


def result(*records: RequestRecord, **more: Any) -> BenchResult:
    given: dict[str, Any] = {
        "workload": "given",
        "settings": {},
        "url": "http://x",
        "endpoint": "/v1/completions",
        "model": "m",
        "duration_seconds": 4.0,
        "requests": list(records),
    }
    return BenchResult(**{**given, **more})


def test_throughput_is_of_the_requests_that_finished() -> None:
    """A request that failed is counted as that, and adds to no throughput."""
    found = summarize(
        result(
            record(0.0, [1.0, 1.5, 2.0]),
            record(1.0, [1.0, 2.0]),
            record(2.0, [0.5], error="timeout"),
            record(2.0, [], error="http_503"),
            record(2.0, [], error="http_503"),
            not_sent=4,
        )
    )

    assert (found.successful_requests, found.failed_requests) == (2, 3)
    assert found.errors == {"http_503": 2, "timeout": 1}
    assert list(found.errors) == ["http_503", "timeout"]
    assert found.not_sent == 4
    assert (found.input_tokens, found.output_tokens) == (200, 5)
    assert found.request_throughput == 2 / 4
    assert found.output_throughput == 5 / 4
    assert found.total_throughput == 205 / 4


def test_times_are_those_of_the_tokens() -> None:
    """TTFT is the first token's, TPOT the mean of the rest per request, ITL every gap."""
    found = summarize(result(record(0.0, [1.0, 1.5, 2.5]), record(0.0, [3.0, 3.25])))

    assert found.ttft is not None
    assert found.ttft.mean_ms == 2000
    assert found.ttft.median_ms == 2000
    assert found.ttft.p99_ms == pytest.approx(2980)
    assert found.tpot == Spread(500.0, 500.0, pytest.approx(745))
    assert found.itl is not None
    assert found.itl.mean_ms == pytest.approx(1750 / 3)
    assert found.itl.median_ms == 500


def test_several_tokens_in_a_piece_do_not_slow_tpot() -> None:
    """The endpoint's count of tokens divides the time, not the number of pieces."""
    one = record(0.0, [1.0, 2.0], output_tokens=5)

    assert one.tpot_seconds == 0.25
    assert one.inter_token_seconds == [1.0]
    assert peak_per_second([one]) == 2.5


def test_percentiles_are_numpys() -> None:
    """Between two values, as vLLM's benchmark has it."""
    np = pytest.importorskip("numpy")
    values = [0.5, 1.0, 4.0, 9.0, 9.5, 30.0]

    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))
    assert spread([]) is None
    assert spread([None, 1.0]) == Spread(1000, 1000, 1000)


def test_peak_concurrency_is_counted_from_what_was_under_way() -> None:
    """Failed requests were under way, too; one that begins as another ends is not at once."""
    records = [
        record(0.0, [2.0]),
        record(1.0, [1.0]),
        record(1.5, [], error="timeout", latency_seconds=3.0),
        record(2.0, [5.0]),
    ]

    assert peak_concurrent(records) == 3
    assert peak_concurrent([]) == 0


def test_peak_throughput_is_of_the_best_second() -> None:
    """Tokens are counted when they came."""
    records = [record(0.0, [0.9, 1.1, 1.2]), record(1.0, [0.5, 0.9, 1.5])]

    assert peak_per_second(records) == 4


def test_what_cannot_be_known_is_left_out_and_said() -> None:
    """No usage: no input tokens, no total throughput; one token: no TPOT. Never a -1."""
    found = summarize(
        result(record(0.0, [1.0], prompt_tokens=None, is_usage_reported=False), record(0.0, []))
    )
    shown = table(found)

    assert found.input_tokens is None
    assert found.total_throughput is None
    assert found.tpot is None
    for absent in ("Total input", "Total Token", "TPOT (ms)", "ITL (ms)", "-1", "Tier"):
        assert absent not in shown
    assert "1 answers came without usage" in shown
    assert "1 answers had no token" in shown
    assert "TPOT and ITL are left out" in shown


def test_busy_client_says_so() -> None:
    """Figures that may be the client's own are not passed off as the server's."""
    busy = summarize(result(record(0.0, [1.0, 2.0]), client_cpu_seconds=3.6))
    idle = summarize(result(record(0.0, [1.0, 2.0]), client_cpu_seconds=1.0))

    assert busy.notes == ["This client was busy for 90% of a core: it may be the bottleneck."]
    assert idle.notes == []


def test_table_has_vllms_rows_and_the_misses_last() -> None:
    """Readers of `vllm bench serve` and of Opal's simulator find their rows."""
    tokens = {"apc": 50, "CPUMemory": 100, "LocalNVMe": 0, "Cache Miss": 50}
    lines = table(
        summarize(
            result(
                record(0.0, [1.0, 1.5], worker="b"),
                record(0.5, [1.0, 1.5], worker="a"),
                tier_tokens=tokens,
            )
        )
    ).splitlines()

    labels = [line.split(":")[0] for line in lines if ":" in line]
    assert labels == [
        "Successful requests",
        "Failed requests",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total Token throughput (tok/s)",
        "P99 sent after it was due (ms)",
        *(f"{kind} {name} (ms)" for name in ("TTFT", "TPOT", "ITL")
          for kind in ("Mean", "Median", "P99")),
        "a",
        "b",
        "apc (25.00%)",
        "CPUMemory (50.00%)",
        "LocalNVMe (0.00%)",
        "Cache Miss (25.00%)",
        *(f"[{tier}] {what}" for tier in ("apc", "CPUMemory", "LocalNVMe")
          for what in ("hit rate (%)", "total tokens fetched", "mean tokens/request")),
    ]  # fmt: skip
    assert any("(GPU->CPU->NVMe)" in line for line in lines)
    assert lines[-1] == "=" * 58


def test_phases_are_reported_on_their_own() -> None:
    """A cold and a warm pass are what one looks at apart."""
    found = summarize(
        result(record(0.0, [4.0, 5.0], phase="cold"), record(0.0, [1.0, 2.0], phase="warm"))
    )

    assert {name: times.mean_ms for name, times in found.phases.items()} == {
        "cold": 4000,
        "warm": 1000,
    }
    assert "Mean TTFT, warm (ms):" in table(found)


def test_nothing_at_all_is_no_fault() -> None:
    """An empty run has zeros, and JSON."""
    found = summarize(result(duration_seconds=0.0))

    assert found.request_throughput == 0
    assert msgspec.json.decode(msgspec.json.encode(found))["successful_requests"] == 0
    assert "Successful requests:" in table(found)
