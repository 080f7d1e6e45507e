"""`opal demo --share` through a store: what one server stored there another one loads."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("httpx")
pytest.importorskip("redis")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEMO = [sys.executable, "-c", "from opal_connector.cli.main import main; main()", "demo"]


def test_what_one_server_stored_in_valkey_another_one_loads(tmp_path: Path) -> None:
    """The whole prompt comes from the store, with equal answers; no process outlives the demo."""
    written, log = tmp_path / "out.json", tmp_path / "server.log"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    options = ["--share", "--tier", "valkey", "--layers", "4"]
    options += ["--json", str(written), "--server-log", str(log)]
    process = subprocess.Popen(
        [*DEMO, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # vLLM's sockets stay where their paths are short enough.
        env={
            **os.environ,
            "TMPDIR": str(temporary),
            "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
        },
    )
    try:
        table, errors = process.communicate(timeout=500)
    finally:
        process.terminate()  # which ends its servers, too
        process.wait(timeout=60)

    assert process.returncode == 0, errors
    report = json.loads(written.read_text())
    assert report["outputs_equal"] is True
    # The second server has computed nothing of it: what it hits can only be in the store.
    assert report["hit_tokens_by_tier"].keys() == {"Valkey"}
    assert report["hit_tokens_by_tier"]["Valkey"] == (report["prompt_tokens"] - 1) // 32 * 32
    assert report["hit_fraction"] >= 0.95
    assert "Valkey" in table
    assert "Traceback" not in errors
    assert "Opal is on: CPUMemory" in log.read_text()
    assert not processes_of(tmp_path)
    assert not list(temporary.glob("opal-demo-*"))


def processes_of(directory: Path) -> list[str]:
    """The processes that name the directory in their command, or hold a file there open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
        except OSError:
            continue
        if int(process.name) != os.getpid() and any(
            str(directory) in text for text in (command, *files)
        ):
            found.append(command)
    return found
