"""LMCache's own benchmarks, which check what they load, with Opal's adapter as the plugin."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import until
from server_status import adapter_status, status

from opal_connector.cli.server_process import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LMCACHE = [sys.executable, "-c", "from lmcache.cli.main import main; main()"]
SHAPE = "(2,64,16,2,16):float32:4"


def environment() -> dict[str, str]:
    """LMCache says nothing to anybody, and finds this package."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
    }


def plugin(directory: Path, **others: Any) -> dict[str, Any]:
    """The adapter's entry in the server's arguments."""
    return {
        "type": "plugin",
        "module_path": "opal_connector.integrations.lmcache.l2_adapter",
        "class_name": "OpalL2Adapter",
        "adapter_params": {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "CPUMemory": {"capacity_GB": "16MiB"},
            "LocalNVMe": {"path": str(directory), "capacity_GB": "128MiB", "reserve_GB": 0},
            **others,
        },
    }


def faulty(adapter: dict[str, Any], **faults: Any) -> dict[str, Any]:
    """LMCache's own wrapper that drops loads."""
    return {"type": "fault_inject", "inner": adapter, **faults}


def run(*arguments: str) -> str:
    """What one of LMCache's commands says; it must succeed."""
    done = subprocess.run(
        [*LMCACHE, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def numbers(output: str, label: str) -> list[float]:
    """The values of all lines of a report that begin so."""
    found = re.findall(rf"^{re.escape(label)}\s+([0-9.]+)$", output, re.MULTILINE)
    return [float(value) for value in found]


def bench_l2(adapter: dict[str, Any]) -> str:
    return run(
        "bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify",
        "--lookup-max-hit-rate", "1.0", "--rounds", "2", "--in-flight", "2",
        "--num-keys", "16", "--data-size-kb", "100",
    )  # fmt: skip


def test_every_byte_of_the_adapter_benchmark_is_verified(tmp_path: Path) -> None:
    """Store, look up, load: all keys succeed, and all bytes are those that were stored."""
    output = bench_l2(plugin(tmp_path))
    assert "data verified OK" in output
    assert "MISMATCH" not in output
    assert numbers(output, "Total success:") == [64, 64, 64]
    assert numbers(output, "Actual hit rate:") == [1.0]


def test_the_adapter_works_inside_the_fault_injector(tmp_path: Path) -> None:
    """One load in every batch is dropped by LMCache; all others are as they should be."""
    output = bench_l2(faulty(plugin(tmp_path), gap_indices=[3]))
    assert "MISMATCH" not in output
    assert numbers(output, "Total success:") == [64, 64, 60]


@contextmanager
def server(log: Path, adapter: dict[str, Any], *arguments: str) -> Iterator[tuple[int, int]]:
    """LMCache's server with the adapter; its two ports."""
    port, http_port, metrics_port = free_port(), free_port(), free_port()
    command = [
        *LMCACHE, "server", "--host", "127.0.0.1", "--port", str(port),
        "--http-host", "127.0.0.1", "--http-port", str(http_port),
        "--prometheus-port", str(metrics_port), "--l1-size-gb", "0.1", "--chunk-size", "128",
        "--supported-transfer-mode", "lmcache_driven",
        "--l2-adapter", json.dumps(adapter), *arguments,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
        try:
            until(
                lambda: process.poll() is not None or status(http_port),
                "the server answers",
                90,
                200,
            )
            assert process.poll() is None, log.read_text()[-3000:]
            yield port, http_port
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def bench_server(port: int, http_port: int) -> str:
    return run(
        "bench", "server", "--mode", "cpu", "--transfer-mode", "lmcache_driven",
        "--rpc-url", f"tcp://127.0.0.1:{port}", "--url", f"http://127.0.0.1:{http_port}",
        "--end", "2", "--interval", "0.1", "--kvcache-shape-spec", SHAPE, "--num-blocks", "64",
    )  # fmt: skip


def test_a_server_keeps_everything_in_opals_tiers_and_finds_it_after_a_restart(
    tmp_path: Path,
) -> None:
    """L1 as a mere buffer: every hit comes from Opal, its bytes are checked, no lock is left."""
    directory, log = tmp_path / "nvme", tmp_path / "server.log"
    alone = ("--eviction-policy", "noop", "--l2-store-policy", "skip_l1")
    with server(log, plugin(directory), *alone) as ports:
        output = bench_server(*ports)
        assert numbers(output, "Checksum OK:") == [2]
        assert "[seq 0/warm] LOOKUP: 4/4 chunks hit" in output
        found = adapter_status(ports[1])
        assert (found["backend"], found["stored_object_count"]) == ("opal", 8)
        assert (found["locked_key_count"], found["failures"]) == (0, {})
    with server(log, plugin(directory), *alone) as ports:
        output = bench_server(*ports)
        assert "[seq 0/cold] LOOKUP: 4/4 chunks hit" in output
        checksums = set(re.findall(r"CHECKSUM: ([0-9a-f]+) \(4 chunks\)", output))
        assert len(checksums) == 1
        assert adapter_status(ports[1])["locked_key_count"] == 0


def test_a_server_with_the_fault_injector_around_the_adapter_is_clean(tmp_path: Path) -> None:
    """Loads that LMCache drops cost hits, never bytes or locks."""
    adapter = faulty(plugin(tmp_path / "nvme"), rate=0.3)
    with server(tmp_path / "server.log", adapter, "--eviction-policy", "LRU") as ports:
        output = bench_server(*ports)
        assert numbers(output, "Checksum OK:") == [2]
        assert numbers(output, "Checksum FAIL:") == [0]
        assert adapter_status(ports[1])["locked_key_count"] == 0


def test_a_server_with_a_mistake_in_its_settings_says_where(tmp_path: Path) -> None:
    """It does not start, and its last words name the field."""
    log = tmp_path / "server.log"
    adapter = plugin(tmp_path / "nvme", CPUMemory={"capacity_GB": "much"})
    with pytest.raises(AssertionError), server(log, adapter, "--eviction-policy", "LRU"):
        pass
    assert "CPUMemory.capacity_GB: found 'much'" in log.read_text()
