"""The picture of `opal replay`: where the tokens came from, and the hit rate along the trace."""

from collections.abc import Sequence
from pathlib import Path

from opal_connector.simulation import CACHE_MISS, ReplayReport


def write_plot(path: Path, reports: Sequence[ReplayReport], title: str) -> None:
    """Draw all replays into one file; its suffix names the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: There is no such format.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed for a file
    from matplotlib import pyplot as plt

    figure, (bars, lines) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    policies = [one.policy for one in reports]
    sources = dict.fromkeys(name for one in reports for name in one.tier_tokens)
    bottom = [0.0] * len(reports)
    for name in sources:
        if name == CACHE_MISS:
            continue
        heights = [100 * one.tier_tokens.get(name, 0) / one.input_tokens for one in reports]
        bars.bar(policies, heights, bottom=bottom, label=name)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    bars.set_ylabel("prompt tokens from a cache (%)")
    bars.legend()
    for one in reports:
        count = len(one.hit_rate_windows)
        places = [100 * (place + 0.5) / count for place in range(count)]
        lines.plot(places, [100 * rate for rate in one.hit_rate_windows], label=one.policy)
    lines.set_xlabel("requests (%)")
    lines.set_ylabel("hit rate (%)")
    lines.set_ylim(bottom=0)
    lines.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
