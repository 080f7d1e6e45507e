"""`opal demo --cluster` as a person runs it, on a few layers: two engines and a router."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_demo_command import servers_of

pytest.importorskip("vllm")
pytest.importorskip("aiohttp")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEMO = [sys.executable, "-c", "from opal_connector.cli.main import main; main()", "demo"]


def test_balanced_computes_half_of_what_round_robin_does_and_both_instances_share_it(
    tmp_path: Path,
) -> None:
    """The same answers by all policies; MaxPrefix gives one instance all of the work."""
    written, log = tmp_path / "out.json", tmp_path / "servers.log"
    options = ["--cluster", "--layers", "4", "--json", str(written), "--server-log", str(log)]
    process = subprocess.Popen(
        [*DEMO, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        table, errors = process.communicate(timeout=500)
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert process.returncode == 0, errors
    report = json.loads(written.read_text())
    found = {one["policy"]: one for one in report["policies"]}
    assert list(found) == ["RoundRobin", "Balanced", "MaxPrefix"]
    assert report["outputs_equal"] is True
    assert report["recomputed_ratio"] <= 0.5
    for one in found.values():
        assert one["requests"] == 64
        hit_tokens = sum(one["hit_tokens_by_tier"].values())
        assert hit_tokens + one["recomputed_tokens"] == one["prompt_tokens"]
        assert one["hit_tokens_by_tier"].keys() == {"apc", "CPUMemory", "LocalNVMe"}
        assert 0 < one["ttft_p50_s"] <= one["ttft_p99_s"]
    assert found["Balanced"]["busiest_share"] <= 1.2
    assert found["MaxPrefix"]["busiest_share"] == 2.0
    assert "Balanced computed" in table
    assert "Traceback" not in errors
    assert not servers_of(log), "the servers outlived the command"
