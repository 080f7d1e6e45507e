"""The load generator `wrk` (Debian package `wrk`), in C: it is not what is measured.

Every connection asks again as soon as it is answered.
"""

import json
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

_SCRIPT: Final = Path(__file__).with_suffix(".lua")
_STRIDE: Final = 53  # how far apart two runs begin in the list of requests


class Load(msgspec.Struct, frozen=True):
    """What came of one run.

    Attributes:
        requests: Answered.
        seconds: That it took.
        p50_us: Median latency in microseconds.
        p99_us: Its 99th percentile.
        maximum_us: The longest.
        failures: Broken connections, and answers that are no success.
        client_cores: Processor time of wrk itself, in cores.
    """

    requests: int
    seconds: float
    p50_us: int
    p99_us: int
    maximum_us: int
    failures: int
    client_cores: float = 0.0

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


class Wrk:
    """Runs of wrk with the requests of one file. Mutable state: the number of runs."""

    def __init__(self, requests: Sequence[bytes], path: Path) -> None:
        if shutil.which("wrk") is None:
            raise SystemExit("wrk is not installed: apt-get install wrk has it.")
        with path.open("wb") as file:
            for request in requests:
                file.write(b"%d\n%b" % (len(request), request))
        self._path = path
        self._runs = 0

    def run(self, url: str, connections: int, seconds: float) -> Load:
        """Asks for whole seconds over so many connections.

        Raises:
            RuntimeError: wrk failed.
        """
        self._runs += 1
        command = ["wrk", "--threads", "1", "--connections", str(connections), "--timeout", "10s"]
        command += ["--duration", f"{max(1, round(seconds))}s", "--script", str(_SCRIPT), url]
        command += ["--", str(self._path), str(self._runs * _STRIDE)]
        used, began = _children_seconds(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        cores = (_children_seconds() - used) / (time.perf_counter() - began)
        if done.returncode:
            raise RuntimeError(f"wrk failed: {done.stderr or done.stdout}")
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return msgspec.convert({**report, "client_cores": cores}, Load)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
