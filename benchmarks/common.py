"""What every benchmark shares: the machine's facts, bars, interleaved repetition, the output.

A benchmark prints one JSON object with `--json`, else a short table. Its exit status is 0 either
way, unless it says otherwise: a missed bar is a figure, not a crash.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from opal_connector.cli import machine

if TYPE_CHECKING:
    from rich.table import Table

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

Figures = dict[str, Any]
QUIET_CORES = 0.1
_STANDARD_OUTPUT = "-"
_STAT_IDLE = (3, 4)  # idle and iowait in the first line of /proc/stat
_STAT_SESSION = 3  # in /proc/PID/stat, behind the name
_STAT_TIMES = slice(11, 15)  # utime, stime, cutime, cstime
_STAT_FIELDS = 8  # guest time is contained in user time


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument(
        "--json",
        nargs="?",
        const=_STANDARD_OUTPUT,
        metavar="FILE",
        help="print one JSON object and nothing else, or write it into a file",
    )
    made.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    return made


def machine_facts() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was before they were."""
    return {
        **msgspec.to_builtins(machine.machine_facts()),
        "torch": metadata.version("torch"),
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def at_least(value: float, bar: float) -> dict[str, Any]:
    """A bar that is met from below."""
    return {"value": round(value, 4), "bar": f">= {bar:g}", "met": bool(value >= bar)}


def at_most(value: float, bar: float) -> dict[str, Any]:
    """A bar that is met from above."""
    return {"value": round(value, 4), "bar": f"<= {bar:g}", "met": bool(value <= bar)}


def _busy_seconds() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : 1 + _STAT_FIELDS]
    ticks = sum(int(value) for place, value in enumerate(fields) if place not in _STAT_IDLE)
    return ticks / os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Processor time that other processes (and the host below a guest) take meanwhile.

    Processes of `sessions` count as ours: the servers under measurement.
    """

    def __init__(self, sessions: Sequence[int] = ()) -> None:
        self._sessions = frozenset(sessions)
        self._began = time.perf_counter()
        self._busy = _busy_seconds()
        self._own = self._own_seconds()

    def cores(self) -> float:
        """Cores that others used on average since the beginning."""
        took = time.perf_counter() - self._began
        others = (_busy_seconds() - self._busy) - (self._own_seconds() - self._own)
        return max(0.0, others / took) if took else 0.0

    def _own_seconds(self) -> float:
        return time.process_time() + session_seconds(self._sessions)


def session_seconds(sessions: frozenset[int]) -> float:
    """Processor seconds of all live processes of these sessions, and of their ended children."""
    if not sessions:
        return 0.0
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended since
        if int(fields[_STAT_SESSION]) in sessions:
            ticks += sum(int(value) for value in fields[_STAT_TIMES])
    return ticks / os.sysconf("SC_CLK_TCK")


def interleaved(
    calls: Mapping[str, Callable[[], float | None]],
    *,
    repetitions: int,
    warm_up: int = 1,
    patience: int = 2,
) -> dict[str, list[float]]:
    """Seconds of every call, one after the other, round after round.

    So whatever else the machine does in a second falls on all of them. A round in which other
    processes used more than a tenth of a core is run again, up to `patience` times as many rounds
    in all; if too few were quiet, all count. A call that returns a number has timed itself, so that
    its preparation does not count.
    """
    rounds: list[dict[str, float]] = []
    quiet: list[dict[str, float]] = []
    for turn in range(warm_up + patience * repetitions):
        load = OtherLoad()
        seconds: dict[str, float] = {}
        for name, call in calls.items():
            began = time.perf_counter()
            own = call()
            seconds[name] = time.perf_counter() - began if own is None else own
        if turn < warm_up:
            continue
        rounds.append(seconds)
        if load.cores() <= QUIET_CORES:
            quiet.append(seconds)
            if len(quiet) == repetitions:
                break
    counted = quiet if len(quiet) >= repetitions / 2 else rounds
    return {name: [seconds[name] for seconds in counted] for name in calls}


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds of `above / below`: what falls on a round falls on both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def emit(
    arguments: argparse.Namespace,
    *,
    facts: Mapping[str, Any],
    statistic: str,
    figures: Figures,
    bars: Mapping[str, Mapping[str, Any]],
    table: "Table | None" = None,
) -> None:
    """Print the result; `table` shows the figures to a person, without one they are listed."""
    is_met = all(bar["met"] for bar in bars.values())
    if arguments.json:
        report = {
            "machine": facts,
            "statistic": statistic,
            "figures": figures,
            "bars": bars,
            "bars_met": is_met,
        }
        text = json.dumps(report, indent=2) + "\n"
        if arguments.json == _STANDARD_OUTPUT:
            sys.stdout.write(text)
            return
        Path(arguments.json).write_text(text)
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / (1 << 30):.1f} GiB; "
        f"Python {facts['python']}, torch {facts['torch']}, vLLM {facts['vllm']}; {statistic}",
        style="dim",
    )
    console.print(table or _listed(figures))
    table = Table("bar", "value", "wanted", "", box=None, pad_edge=False)
    for name, bar in bars.items():
        verdict = "[green]met[/]" if bar["met"] else "[red]missed[/]"
        table.add_row(name, f"{bar['value']:.4g}", bar["bar"], verdict)
    console.print(table)


def _listed(figures: Figures) -> "Table":
    from rich.table import Table

    table = Table("figure", "value", box=None, pad_edge=False)
    for name, value in _flat(figures):
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    return table


def note(message: str) -> None:
    """Say on standard error how far a long benchmark is."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _flat(figures: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows.append((prefix + name, ", ".join(_short(item) for item in value)))
        else:
            rows.append((prefix + name, value))
    return rows


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
