"""`opal serve` as a process of its own: what it says, how it ends, and that it leaves nothing."""

import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serve_world import descendants, given, lives

PATIENCE_SECONDS = 30.0
COMMAND = [sys.executable, "-c", "from opal_connector.cli.main import main; main()", "serve"]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def written(directory: Path, **changes: Any) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(given(directory, **changes)))
    return path


@contextlib.contextmanager
def started(directory: Path, **changes: Any) -> Iterator["subprocess.Popen[str]"]:
    path = written(directory, **changes)
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*COMMAND, "--config", str(path)], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Serving at http://127.0.0.1:"), line
    return line.split()[2].rstrip(";")


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_ctrl_c_ends_everything_within_seconds(tmp_path: Path) -> None:
    """The exit code says that all is well, and no process is left, not even a forgotten one."""
    child_file = tmp_path / "child"
    environment = {"FAKE_CHILD": str(child_file)}
    with started(tmp_path, environment=environment, instances=2) as process:
        url = url_of(process)
        until(lambda: is_ready(url), "an engine")
        until(lambda: len(descendants(process.pid)) >= 5, "all processes")
        left = descendants(process.pid)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert time.monotonic() - began < 10
        until(lambda: not any(map(lives, left)), "the end of all processes")
        log = (tmp_path / "log").read_text()
    assert "Ending: what is under way may end" in log
    assert "engine-1 | a fake engine begins" in log
    assert "WARNING" not in log


def test_nothing_outlives_serve_when_it_is_killed(tmp_path: Path) -> None:
    """SIGKILL cannot be heeded; engines, what they have started and the guardian end as well."""
    environment = {"FAKE_CHILD": str(tmp_path / "child"), "FAKE_DEAF": 1}
    with started(tmp_path, environment=environment) as process:
        url = url_of(process)
        until(lambda: is_ready(url), "an engine")
        until(lambda: len(descendants(process.pid)) >= 5, "all processes")
        left = descendants(process.pid)
        process.kill()
        process.wait()
        until(lambda: not any(map(lives, left)), "the end of all processes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_credential_is_in_a_list_of_processes_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Engines are given stores in a file, which is gone at the end, however it comes."""
    private = tmp_path / "private"
    private.mkdir()
    monkeypatch.setenv("TMPDIR", str(private))
    tiers = {"kvc_tiers": ["CPUMemory", "Valkey"], "Valkey": {"url": "redis://:hunter2@host"}}
    with started(tmp_path, tiers=tiers) as process:
        url = url_of(process)
        until(lambda: is_ready(url), "the engines")
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(process.pid)]
        assert any(b"opal_config" in command for command in commands)
        assert not any(b"hunter2" in command for command in commands)
        files = list(private.rglob("*.json"))
        assert [path.name for path in sorted(files)] == ["engine-1.json", "engine-2.json"]
        assert "hunter2" in files[0].read_text()
        process.send_signal(number)
        until(lambda: not list(private.rglob("*.json")), "the files to be removed")
        process.wait(PATIENCE_SECONDS)
    assert "hunter2" not in (tmp_path / "log").read_text()


def test_a_second_signal_waits_for_nothing(tmp_path: Path) -> None:
    """Engines that would take a minute are killed, and the exit code tells that."""
    stop = {"drain_seconds": 60, "kill_seconds": 60}
    with started(tmp_path, environment={"FAKE_DEAF": 1}, stop=stop) as process:
        url = url_of(process)
        until(lambda: is_ready(url), "an engine")
        left = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        until(lambda: "Ending:" in (tmp_path / "log").read_text(), "the beginning of the end")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
        until(lambda: not any(map(lives, left)), "the end of all processes")


def test_when_no_engine_can_run_it_says_so_and_ends(tmp_path: Path) -> None:
    """A service manager sees the failure; a person sees the engines' own words."""
    restart = {"first_seconds": 0.01, "limit": 1}
    path = written(tmp_path, environment={"FAKE_DIES": 1}, restart=restart)
    ended = subprocess.run(
        [*COMMAND, "--config", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "Error: All engines have failed; their last lines are above." in ended.stderr
    assert "engine-2 | it dies at once" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router": {"port": 70_000}}, "router.port: found 70000, allowed: 0 to 65535"),
        ({"instances": 0}, "instances: found 0, allowed: 1 to max_workers (50), or a list"),
        ({"stopp": {}}, "stopp: unknown field; allowed here: model, instances"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """The field, what was found, what is allowed; nothing is started."""
    path = written(tmp_path, **changes)
    ended = subprocess.run(
        [*COMMAND, "--config", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


def test_check_only_checks(tmp_path: Path) -> None:
    """It says what would be run."""
    ended = subprocess.run(
        [*COMMAND, "--config", str(written(tmp_path)), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("The configuration is right: 2 instances of ")
