"""Placement between memory and a disk on request traces: hits, disk writes, admission.

Whole traces go through the real books in virtual time, one request after the other, both tiers
LRU. Chunks are the blocks of the trace. A small disk is written through at first sight ("always"),
as `admission` "adaptive" decides, and by demotion; a disk that holds everything is written through.
"""

from pathlib import Path
from typing import Any, NamedTuple

from common import Figures, OtherLoad, at_least, at_most, emit, machine_facts, note, parser

from opal_connector.config import CPUMemoryConfig, LocalNVMeConfig, OpalConfig
from opal_connector.simulation import (
    Replay,
    ReplayReport,
    ReplaySettings,
    Trace,
    generated_chats,
    read_trace,
)

TRACES = Path(__file__).parents[2] / "shared/traces"
FILES = {
    "conversation": "mooncake_conversation_trace",
    "synthetic": "mooncake_synthetic_trace",
    "agent": "claude_code_512",
}
BYTES_PER_TOKEN = 128 << 10
MODES = {
    "always": {"write": "through", "admission": "always"},
    "adaptive": {"write": "through", "admission": "adaptive"},
    "demote": {"write": "demote", "admission": "always"},
}


class Case(NamedTuple):
    """A trace, the sizes of memory and disk in blocks, and what is asked of admission there."""

    trace: str
    memory: int
    disk: int
    fewer_writes: float  # at least, 0 where no share of the writes could be saved
    lost_points: float  # at most


CASES = {
    "conversation_500_5000": Case("conversation", 500, 5000, 3.0, 1.0),
    "conversation_1000_10000": Case("conversation", 1000, 10_000, 3.0, 1.0),
    "conversation_3000_30000": Case("conversation", 3000, 30_000, 0.0, 0.3),
    "synthetic_1000_5000": Case("synthetic", 1000, 5000, 0.0, 1.0),
    "agent_500_2000": Case("agent", 500, 2000, 0.0, 1.0),
}
MEMORY_ABOVE_ALL = {"conversation": 1000, "synthetic": 1000, "agent": 500}


def load_traces(is_quick: bool) -> tuple[dict[str, Trace], bool]:
    """The traces, and whether they are the recorded ones."""
    is_real = all((TRACES / f"{name}.jsonl.gz").exists() for name in FILES.values())
    if is_real:
        traces = {name: read_trace(TRACES / f"{file}.jsonl.gz") for name, file in FILES.items()}
    else:
        traces = {
            "conversation": generated_chats(1, 12_000, turn_chance=0.4, chats_kept=400),
            "synthetic": generated_chats(2, 4000, turn_chance=0.7, chats_kept=200),
            "agent": generated_chats(3, 2000, turn_chance=0.96, chats_kept=30),
        }
    if is_quick:
        traces = {
            name: Trace(trace.block_tokens, trace.requests[: len(trace.requests) // 4])
            for name, trace in traces.items()
        }
    return traces, is_real


def replayed(trace: Trace, *, memory: int, disk: int, **rules: Any) -> ReplayReport:
    """One replay whose books were audited at its end."""
    block_bytes = trace.block_tokens * BYTES_PER_TOKEN
    config = OpalConfig(
        kvc_tiers=("CPUMemory", "LocalNVMe"),
        CPUMemory=CPUMemoryConfig(capacity_GB=f"{memory * block_bytes}B"),
        LocalNVMe=LocalNVMeConfig(path="none", capacity_GB=f"{disk * block_bytes}B", **rules),
    )
    settings = ReplaySettings(config=config, bytes_per_token=BYTES_PER_TOKEN, is_sequential=True)
    replay = Replay(trace, settings)
    report = replay.run("LRU")
    replay.check()
    return report


def row(report: ReplayReport) -> dict[str, float]:
    """What a table shows of a replay."""
    disk = report.tiers["LocalNVMe"]
    return {
        "hit": round(report.hit_rate, 4),
        "memory_hit": round(report.tiers["CPUMemory"].hit_rate, 4),
        "disk_hit": round(disk.hit_rate, 4),
        "disk_writes": disk.written_objects,
        "writes_per_unique_chunk": round(disk.writes_per_unique_chunk, 3),
        "replay_seconds": round(report.replay_seconds, 1),
    }


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    traces, is_real = load_traces(arguments.quick)
    small: dict[str, dict[str, Any]] = {}
    bars: dict[str, dict[str, Any]] = {}
    for name, case in CASES.items():
        found = {}
        for mode, rules in MODES.items():
            note(f"placement: {name} {mode}")
            found[mode] = replayed(traces[case.trace], memory=case.memory, disk=case.disk, **rules)
        writes = {mode: one.tiers["LocalNVMe"].written_objects for mode, one in found.items()}
        fewer = writes["always"] / max(1, writes["adaptive"])
        lost_points = 100 * (found["always"].hit_rate - found["adaptive"].hit_rate)
        small[name] = {mode: row(one) for mode, one in found.items()}
        small[name]["adaptive_fewer_writes"] = round(fewer, 2)
        small[name]["adaptive_lost_points"] = round(lost_points, 2)
        bars[f"adaptive_lost_points_{name}"] = at_most(lost_points, case.lost_points)
        if case.fewer_writes and not arguments.quick:  # a quarter of a trace mostly fills the disk
            bars[f"adaptive_fewer_writes_{name}"] = at_least(fewer, case.fewer_writes)
    whole: dict[str, dict[str, Any]] = {}
    for name, trace in traces.items():
        note(f"placement: {name}, a disk for everything")
        disk = 2 * trace.unique_chunks(1)
        report = replayed(trace, memory=MEMORY_ABOVE_ALL[name], disk=disk, write="through")
        whole[name] = {**row(report), "unique_chunks": report.unique_chunks}
        share = report.tiers["LocalNVMe"].writes_per_unique_chunk
        bars[f"writes_per_unique_chunk_{name}"] = at_most(share, 1.05)
    figures: Figures = {
        "traces": "real" if is_real else "generated",
        "disk_smaller_than_trace": small,
        "disk_for_everything": whole,
        "cores_used_by_others": round(load.cores(), 2),
    }
    statistic = "hit: share of prompt tokens over the whole trace; writes: chunks to the disk"
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


if __name__ == "__main__":
    main()
