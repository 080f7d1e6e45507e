"""`opal demo` as a person runs it, on a few layers: a real server, a real model, real reuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("httpx")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FIELDS = {
    "cold_ttft_s",
    "warm_ttft_s",
    "device_ttft_s",
    "ttft_ratio",
    "warm_to_device_ratio",
    "prompt_tokens",
    "hit_tokens_by_tier",
    "hit_fraction",
    "outputs_equal",
    "model",
    "machine",
    "warm_ttfts_s",
    "device_ttfts_s",
    "num_gpu_blocks",
    "num_gpu_blocks_without_opal",
}
DEMO = [sys.executable, "-c", "from opal_connector.cli.main import main; main()", "demo"]


def test_demo_reuses_the_whole_prompt(tmp_path: Path) -> None:
    """The prompt comes from the tier but for its last block, and every answer is the same."""
    written, log = tmp_path / "out.json", tmp_path / "server.log"
    options = ["--layers", "4", "--json", str(written), "--server-log", str(log)]
    process = subprocess.Popen(
        [*DEMO, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        table, errors = process.communicate(timeout=400)
    finally:
        process.terminate()  # which ends its server, too
        process.wait(timeout=60)

    assert process.returncode == 0, errors
    report = json.loads(written.read_text())
    assert report.keys() == FIELDS
    assert report["outputs_equal"] is True
    assert abs(report["prompt_tokens"] - 2000) <= 20
    assert report["hit_tokens_by_tier"].keys() == {"CPUMemory"}
    # vLLM recomputes the last token, so the last block: all blocks before it were hit.
    hit_tokens = report["hit_tokens_by_tier"]["CPUMemory"]
    assert hit_tokens == (report["prompt_tokens"] - 1) // 32 * 32
    assert report["hit_fraction"] == round(hit_tokens / report["prompt_tokens"], 4) >= 0.95
    assert report["model"] == "smollm2-135m-layers4"
    assert len(report["warm_ttfts_s"]) == len(report["device_ttfts_s"]) == 3
    assert report["num_gpu_blocks"] == report["num_gpu_blocks_without_opal"] > 0
    assert "CPUMemory" in table
    assert "Traceback" not in errors

    server_log = log.read_text()
    assert "Opal is on: CPUMemory" in server_log
    assert not servers_of(log), "the server outlived the command"


def servers_of(log: Path) -> list[int]:
    """The processes that still hold the server's log open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if str(log) in files:
            found.append(int(process.name))
    return found
