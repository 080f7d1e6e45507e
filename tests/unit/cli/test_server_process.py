"""A server as a child process: whatever happens to us, it ends."""

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakes import heed_interrupts

pytest.importorskip("httpx")

from opal_connector.cli import server_process
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_process import ServerPlan, opal_transfer_config, serve
from opal_connector.config import load_config


def test_transfer_config_is_loadable() -> None:
    """What the server is started with is what the connector reads."""
    config = opal_transfer_config({"kvc_tiers": ["CPUMemory"], "CPUMemory": {"capacity_GB": 1}})

    assert load_config(config["kv_connector_extra_config"]).CPUMemory.capacity_GB == 1


class ScriptPlan(ServerPlan):
    """Runs a script in place of vLLM; it gets the port as its argument."""

    script = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.script, str(port)]


HEALTHY = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def quick_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "_STOP_SECONDS", 1.0)
    monkeypatch.setattr(server_process, "_REST_SECONDS", 0.5)


def scripted(script: str, log_path: Path) -> ServerPlan:
    plan = ScriptPlan(log_path.parent, log_path, ready_seconds_max=30)
    object.__setattr__(plan, "script", script)
    return plan


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def child_of(log_path: Path) -> int:
    return int(log_path.read_text().split()[1])


@pytest.mark.usefixtures("quick_stop")
def test_server_and_its_children_end_with_the_block(tmp_path: Path) -> None:
    """Nothing runs on, not even a child that the server forgot; an error passes through."""
    log_path = tmp_path / "log"
    pids: list[int] = []

    def use_server() -> None:
        with serve(scripted(HEALTHY, log_path), Reporter()) as server:
            pids.extend([server.pid, child_of(log_path)])
            assert all(map(lives, pids))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use_server()

    assert len(pids) == 2
    assert not any(map(lives, pids))


def test_missing_vllm_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without vLLM the user learns what to install."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with (
        pytest.raises(CommandFailure, match="vLLM is not installed: pip install"),
        serve(ServerPlan(tmp_path, tmp_path / "log"), Reporter()),
    ):
        pass


def test_server_that_ends_early_shows_its_log(tmp_path: Path) -> None:
    """The reason is in the log; the user sees its end and where it lies."""
    script = "print('line one'); raise SystemExit('no such model')"

    with (
        pytest.raises(CommandFailure) as error,
        serve(scripted(script, tmp_path / "log"), Reporter()),
    ):
        pass

    assert "ended with code 1 before it was ready" in error.value.message
    assert "no such model" in error.value.message
    assert str(tmp_path / "log") in error.value.message


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = ["{directory}", "{directory}/../.."]
import test_server_process as here
script = here.HEALTHY.replace("send_response(200)", "send_response(503)")
with here.serve(here.scripted(script, Path("{log_path}")), here.Reporter()):
    pass
"""


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_server_within_seconds(tmp_path: Path, signal_number: int) -> None:
    """Ctrl-C and SIGTERM while the server starts leave nothing running."""
    log_path = tmp_path / "log"
    program = PROGRAM.format(directory=Path(__file__).parent, log_path=log_path)
    command = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    deadline = time.monotonic() + 30
    while not (log_path.is_file() and log_path.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = child_of(log_path)

    command.send_signal(signal_number)
    _, errors = command.communicate(timeout=20)

    assert "KeyboardInterrupt" in errors
    assert not lives(child)
