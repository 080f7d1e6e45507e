"""Opal's connector, LMCache, and LMCache with Opal's tiers: time to the first token of a prompt.

The same real prompts, the same vLLM and the same room for all, in turns. Every prompt is computed
once, asked again after the device's prefix cache was emptied, asked once more after all processes
were stopped and started again, and once more after that and after the kernel has forgotten the
files, as it has when the host itself is started again: what reads through the page cache finds its
files there before, and what reads past it does not. Needs vLLM and lmcache in one environment.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import Figures, at_least, at_most, emit, machine_facts, note, parser
from rich.table import Table
from serving import (
    LMCACHE_MEMORY,
    Server,
    has_lmcache,
    lmcache_server,
    opal_plan_by,
    scratch,
    started,
)

from opal_connector.cli.demo_runs import demo_prompt
from opal_connector.cli.models import ensure_smollm2

PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 8
PHASES = ("cold", "warm", "restart", "host_restart")
# What is forgotten before an arm's processes are started again, by the phase that follows.
RESTARTS = {"restart": False, "host_restart": True}
_SETTLE_SECONDS = 1.0
_QUIET_LOOKS = 3
_WRITTEN_SECONDS_MAX = 60.0
_HITS = "vllm:external_prefix_cache_hits_total"
_DISK = {"capacity_GB": "4GiB"}
_MEMORY = {"capacity_GB": "1GiB"}


@dataclass(frozen=True)
class Setting:
    """What all arms share: the model, the interpreter, a directory for an arm's disk and logs."""

    model: Path
    python: str
    directory: Path

    @property
    def disk(self) -> Path:
        """Where the arm keeps what outlives a restart."""
        return self.directory / "disk"


# ---- the arms ----


def opal(setting: Setting) -> AbstractContextManager[Server]:
    """Opal's own connector: memory over a disk."""
    tiers = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe"],
        "CPUMemory": _MEMORY,
        "LocalNVMe": {"path": str(setting.disk), **_DISK},
    }
    return started(opal_plan_by(setting.python, setting.model, setting.directory, tiers))


def lmcache(setting: Setting) -> AbstractContextManager[Server]:
    """LMCache alone: its memory, and its own adapter of a directory."""
    adapter = {"type": "fs", "base_path": str(setting.disk)}
    return _lmcache(setting, *LMCACHE_MEMORY, "--l2-adapter", json.dumps(adapter))


def lmcache_over_opal(setting: Setting) -> AbstractContextManager[Server]:
    """LMCache's memory over Opal's disk."""
    adapter = _adapter(setting, ["LocalNVMe"])
    return _lmcache(setting, *LMCACHE_MEMORY, "--l2-adapter", json.dumps(adapter))


def lmcache_with_opal(setting: Setting) -> AbstractContextManager[Server]:
    """Opal's memory and disk, and LMCache's memory as a buffer."""
    adapter = _adapter(setting, ["CPUMemory", "LocalNVMe"], CPUMemory=_MEMORY)
    buffer = ("--l1-size-gb", "0.5", "--eviction-policy", "noop", "--l2-store-policy", "skip_l1")
    return _lmcache(setting, *buffer, "--l2-adapter", json.dumps(adapter))


def _adapter(setting: Setting, tiers: list[str], **others: Any) -> dict[str, Any]:
    disk = {"path": str(setting.disk), **_DISK}
    return {
        "type": "plugin",
        "module_path": "opal_connector.integrations.lmcache.l2_adapter",
        "class_name": "OpalL2Adapter",
        "adapter_params": {"kvc_tiers": tiers, "LocalNVMe": disk, **others},
    }


def _lmcache(setting: Setting, *storage: str) -> AbstractContextManager[Server]:
    return lmcache_server(setting.model, setting.directory, setting.python, storage)


ARMS: dict[str, Callable[[Setting], AbstractContextManager[Server]]] = {
    "opal": opal,
    "lmcache": lmcache,
    "lmcache_over_opal_disk": lmcache_over_opal,
    "lmcache_with_opal": lmcache_with_opal,
}


# ---- measuring ----


@dataclass
class Seconds:
    """Times to the first token and hit tokens by phase, of one arm, all passes together."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    hits: dict[str, list[int]] = field(default_factory=lambda: {p: [] for p in PHASES})
    prompt_tokens: list[int] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    are_outputs_equal: bool = True

    def figures(self) -> Figures:
        """Medians, and every single value."""
        return {
            **{f"{phase}_s": statistics.median(self.seconds[phase]) for phase in PHASES},
            **{f"all_{phase}_s": self.seconds[phase] for phase in PHASES},
            **{f"{phase}_hit_tokens": statistics.median(self.hits[phase]) for phase in PHASES},
            **{f"all_{phase}_hit_tokens": self.hits[phase] for phase in PHASES},
            "prompt_tokens": self.prompt_tokens,
            "outputs_equal": self.are_outputs_equal,
            "cores_used_by_others": round(max(self.others), 2),
        }


def measure(
    start: Callable[[], AbstractContextManager[Server]], found: Seconds, **how: Any
) -> None:
    """One pass of an arm: its processes three times."""
    prompts, again, disk = how["prompts"], how["again"], how["disk"]
    answers: list[tuple[int, ...]] = []
    with _warmed_up(start, found) as server:
        for prompt in prompts:
            answers.append(_ask(server, prompt, "cold", found))
            for _ in range(again):
                time.sleep(_SETTLE_SECONDS)
                server.client.reset_prefix_cache()
                found.are_outputs_equal &= _ask(server, prompt, "warm", found) == answers[-1]
        _await_written(disk)
    for phase, is_forgotten in RESTARTS.items():
        if is_forgotten:
            forget_files(disk)
        with _warmed_up(start, found) as server:
            for prompt, answer in zip(prompts, answers, strict=True):
                found.are_outputs_equal &= _ask(server, prompt, phase, found) == answer


@contextlib.contextmanager
def _warmed_up(
    start: Callable[[], AbstractContextManager[Server]], found: Seconds
) -> Iterator[Server]:
    with start() as server:
        server.client.complete("Good morning! The weather today is", max_tokens=4)
        load = server.load()
        yield server
        found.others.append(load.cores())


def _ask(server: Server, prompt: str, phase: str, found: Seconds) -> tuple[int, ...]:
    before = _external_hits(server)
    answer = server.client.complete(prompt, max_tokens=OUTPUT_TOKENS)
    found.seconds[phase].append(answer.ttft_seconds)
    found.hits[phase].append(_external_hits(server) - before)
    if phase == PHASES[0]:
        found.prompt_tokens.append(answer.prompt_tokens)
    return answer.token_ids


def _external_hits(server: Server) -> int:
    return round(sum(s.value for s in server.client.samples() if s.name == _HITS))


def forget_files(directory: Path) -> None:
    """Have the kernel keep nothing of these files in memory, whoever wrote them."""
    for path in directory.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)  # what is not written yet would stay
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def _await_written(disk: Path) -> None:
    """Until the directory has not changed for a few looks: stores go on behind the answers."""
    give_up_at = time.monotonic() + _WRITTEN_SECONDS_MAX
    before, quiet = -1, 0
    while quiet < _QUIET_LOOKS and time.monotonic() < give_up_at:
        time.sleep(_SETTLE_SECONDS)
        now = sum(1 for path in disk.rglob("*") if path.is_file())
        quiet, before = (quiet + 1 if now == before else 0), now


# ---- showing ----


def bars(figures: Figures) -> dict[str, Any]:
    """What must hold of the arms that there are."""
    met: dict[str, Any] = {}
    for name, row in figures.items():
        met[f"{name}: outputs equal"] = at_least(float(row["outputs_equal"]), 1)
        met[f"{name}: cold / after restart"] = at_least(row["cold_s"] / row["restart_s"], 3)
        if name.startswith("lmcache_") and "lmcache" in figures:
            for phase in RESTARTS:
                met |= _beside(name, row, figures["lmcache"], phase)
    return met


def _beside(name: str, row: Figures, peer: Figures, phase: str) -> dict[str, Any]:
    after = f"after {_called(phase)}"
    hits = row[f"{phase}_hit_tokens"] / max(1, peer[f"{phase}_hit_tokens"])
    ratio = row[f"{phase}_s"] / peer[f"{phase}_s"]
    return {
        f"{name}: hit tokens {after} / LMCache's": at_least(hits, 1),
        f"{name}: {after} / LMCache's": at_most(ratio, 1.25),
    }


def _called(phase: str) -> str:
    return phase.replace("_", " ")


def _brief(row: Figures) -> str:
    return ", ".join(
        f"{phase} {row[f'{phase}_s']:.3f} s {row[f'{phase}_hit_tokens']:.0f} hit"
        for phase in PHASES
    )


def table(figures: Figures) -> Table:
    """A row for every arm."""
    heads = [f"{_called(phase)} s" for phase in PHASES]
    heads += [f"{_called(phase)} hits" for phase in PHASES[1:]]
    shown = Table("", *heads, box=None, pad_edge=False)
    for name, row in figures.items():
        times = (f"{row[f'{phase}_s']:.3f}" for phase in PHASES)
        hits = (f"{row[f'{phase}_hit_tokens']:.0f}" for phase in PHASES[1:])
        shown.add_row(name, *times, *hits)
    return shown


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    facts = machine_facts()
    model = ensure_smollm2()
    text = demo_prompt(model / "tokenizer.json", PROMPT_TOKENS)
    count = 2 if arguments.quick else arguments.prompts
    # The number comes first, so that no two prompts share a block.
    prompts = [f"{number} is the number of this text.\n{text}" for number in range(count)]
    found = {name: Seconds() for name in arguments.arms}
    for _ in range(1 if arguments.quick else arguments.passes):
        for name in arguments.arms:
            note(f"{name} ...")
            with scratch() as directory:
                setting = Setting(model, arguments.python, directory)
                setting.disk.mkdir()
                start = partial(ARMS[name], setting)
                again = 1 if arguments.quick else arguments.again
                measure(start, found[name], prompts=prompts, again=again, disk=setting.disk)
            note(f"{name}: {_brief(found[name].figures())}")
    figures: Figures = {name: seconds.figures() for name, seconds in found.items()}
    statistic = f"medians over {len(found[arguments.arms[0]].seconds['cold'])} prompts"
    emit(
        arguments,
        facts=facts,
        statistic=statistic,
        figures=figures,
        bars=bars(figures),
        table=table(figures),
    )


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--prompts", type=int, default=3, help="different prompts in a pass")
    made.add_argument("--again", type=int, default=2, help="times that each is asked warm")
    made.add_argument("--passes", type=int, default=2, help="times that each arm is run")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    made.add_argument(
        "--python",
        default=sys.executable,
        help="the interpreter that has vLLM and lmcache (default: this one)",
    )
    arguments = made.parse_args()
    if not has_lmcache(arguments.python):
        made.error(f"{Path(arguments.python).name} cannot import lmcache")
    return arguments


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
