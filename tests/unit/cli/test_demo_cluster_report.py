"""What the cluster's demo makes of its runs: sums by hand, and each thing that can be wrong."""

import msgspec
import pytest

from opal_connector.cli.bench import BenchResult, RequestRecord
from opal_connector.cli.demo_cluster_report import (
    ClusterReport,
    complaint,
    show_cluster,
    summarize_cluster,
)
from opal_connector.cli.machine import machine_facts


def record(user: int, turn: int, worker: str, cached: int, text: str = "a") -> RequestRecord:
    return RequestRecord(
        conversation_id=f"user-{user}",
        turn=turn,
        sent_seconds=float(turn),
        latency_seconds=1.0,
        token_seconds=[0.5 if cached else 2.0, 2.5],
        prompt_tokens=100,
        cached_tokens=cached,
        output_tokens=10,
        output_text=text,
        worker=worker,
    )


def result(records: list[RequestRecord], **tiers: int) -> BenchResult:
    return BenchResult(
        workload="sessions",
        settings={},
        url="http://x",
        endpoint="/v1/chat/completions",
        model="m",
        duration_seconds=4.0,
        requests=records,
        tier_tokens={**tiers, "Cache Miss": 1},
    )


def report(balanced: list[RequestRecord]) -> ClusterReport:
    baseline = [record(1, 0, "one", 0), record(1, 1, "two", 0)]
    found = {"RoundRobin": result(baseline), "Balanced": result(balanced, apc=10, CPUMemory=80)}
    return summarize_cluster(found, instance_count=2, model="m", machine=machine_facts())


def test_tokens_work_and_shares_are_summed_by_policy() -> None:
    found = report([record(1, 0, "one", 0), record(1, 1, "one", 90)])
    balanced = found.policy("Balanced")
    assert balanced.prompt_tokens == 200
    assert balanced.recomputed_tokens == 110
    assert balanced.work_tokens == {"one": 130}
    assert balanced.requests_by_instance == {"one": 2}
    assert balanced.busiest_share == 2.0
    assert balanced.hit_tokens_by_tier == {"apc": 10, "CPUMemory": 80}
    assert (balanced.ttft_p50_s, balanced.duration_s) == (1.25, 4.0)
    assert found.policy("RoundRobin").busiest_share == 1.0
    assert found.recomputed_ratio == 0.55
    assert found.outputs_equal
    assert msgspec.json.decode(msgspec.json.encode(found), type=ClusterReport) == found


@pytest.mark.parametrize(
    ("balanced", "wrong"),
    [
        ([record(1, 0, "one", 90), record(1, 1, "two", 90)], None),
        ([record(1, 0, "one", 90), record(1, 1, "two", 90, "b")], "The answers differ"),
        ([record(1, 0, "one", 0), record(1, 1, "two", 90)], "Balanced computed 55% of what Ro"),
        ([record(1, 0, "one", 90), record(1, 1, "one", 90)], "One instance did 2.00 times its"),
    ],
)
def test_what_is_wrong_is_one_sentence(balanced: list[RequestRecord], wrong: str | None) -> None:
    said = complaint(report(balanced))
    assert said is None if wrong is None else said is not None and said.startswith(wrong)


def test_a_person_sees_the_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    show_cluster(report([record(1, 0, "one", 90), record(1, 1, "two", 90)]))
    shown = capsys.readouterr().out
    assert "RoundRobin" in shown
    assert "hit in CPUMemory" in shown
    assert "Balanced computed 10% of what RoundRobin did; the same answers by all" in shown
