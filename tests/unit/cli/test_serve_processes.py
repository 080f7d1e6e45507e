"""One process of an engine: its lines, its end, and that of all that it has started."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from serve_world import lives

from opal_connector.cli.serving.engine_process import EngineProcess
from opal_connector.cli.serving.guard import Guard

CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
"""


def run(body: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(body, 30))


@pytest.fixture
def guard() -> Iterator[Guard]:
    made = Guard()
    yield made
    made.close()
    assert not lives(made.pid)


def script(text: str, guard: Guard, lines: list[str]) -> EngineProcess:
    return EngineProcess([sys.executable, "-c", text], os.environ, guard, lines.append)


async def eventually(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


def test_lines_come_whole_whatever_ends_them(guard: Guard) -> None:
    """Progress bars end with a carriage return, the last line with nothing, some never."""
    text = r"""
import sys
sys.stdout.write("one\ntwo\r\nthree\rfour " + "\xe9" + "x" * 40_000 + "\n\nlast")
"""
    lines: list[str] = []

    async def body() -> None:
        process = script(text, guard, lines)
        assert await process.wait() == 0
        assert await process.clear() == 0

    run(body())
    assert lines[:3] == ["one", "two", "three"]
    assert lines[-1] == "last"
    assert "".join(lines[3:-1]) == "four é" + "x" * 40_000


def test_what_it_has_started_ends_with_it(guard: Guard) -> None:
    """Also when it ended by itself and forgot its child."""
    lines: list[str] = []

    async def body() -> None:
        process = script(CHILD + "sys.exit(3)", guard, lines)
        assert await process.wait() == 3
        assert await process.clear() == 3
        assert not lives(int(lines[0].split()[1]))

    run(body())


def test_a_request_to_end_is_heeded_and_told_from_a_kill(guard: Guard) -> None:
    """A process that ends in time is not killed; one that does not is, after that time."""
    heeding = "import signal, sys\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\n"
    waiting = "print('ready', flush=True)\nimport time\ntime.sleep(600)"

    async def ended(text: str, seconds: float) -> int:
        lines: list[str] = []
        process = script(text + waiting, guard, lines)
        await eventually(lambda: lines == ["ready"], "its beginning")
        return await process.stop(seconds)

    async def body() -> None:
        assert await ended(heeding, 20) == 7
        assert await ended(deaf, 0.1) == -9

    run(body())


def test_a_program_that_is_not_there_is_named(guard: Guard) -> None:
    """The launcher's word is the engine's last line."""
    lines: list[str] = []

    async def body() -> None:
        process = EngineProcess(["/no/such/program"], os.environ, guard, lines.append)
        await process.wait()
        assert await process.clear() == 127

    run(body())
    assert lines == ["/no/such/program cannot be started: No such file or directory"]


def test_a_program_whose_parent_is_gone_already_does_not_begin(tmp_path: Path) -> None:
    """The kernel is asked after the fork, which may be too late."""
    mark = tmp_path / "mark"
    command = Guard.command([sys.executable, "-c", f"open({str(mark)!r}, 'w')"])
    command[command.index(str(os.getpid()))] = "1"  # as if our parent were another one by now
    assert subprocess.run(command, check=False).returncode == 1
    assert not mark.exists()


def test_the_guardian_removes_directories(tmp_path: Path) -> None:
    """Whatever their names, and those of nobody else."""
    private, other = tmp_path / "näme with spaces", tmp_path / "other"
    for directory in (private, other):
        directory.mkdir()
        (directory / "file").touch()
    made = Guard()
    made.remove(private)
    made.remove(tmp_path / "not there")
    made.close()
    assert not private.exists()
    assert (other / "file").exists()


def test_the_guardian_kills_only_what_is_still_watched() -> None:
    """A group that has ended may be somebody else's by now."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    watched, forgotten = (subprocess.Popen(sleep, start_new_session=True) for _ in range(2))
    try:
        made = Guard()
        made.watch(watched.pid)
        made.watch(forgotten.pid)
        made.forget(forgotten.pid)
        made.close()
        assert watched.wait(10) == -9
        assert forgotten.poll() is None
    finally:
        for process in (watched, forgotten):
            process.kill()
            process.wait()
