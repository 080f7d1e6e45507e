"""The picture of `opal simulate`: what changes as the cluster grows, one line per policy."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from opal_connector.simulated_cluster import ClusterReport

_TTFT: Final = "time to the first token, p95 (s)"
_PANELS: Final[dict[str, Callable[[ClusterReport], float]]] = {
    "hit rate (%)": lambda one: 100 * one.hit_rate,
    _TTFT: lambda one: one.ttft_seconds["p95"],
    "busiest instance over the mean": lambda one: one.balance.imbalance,
    "event bytes a request": lambda one: one.traffic.bytes_per_request,
    "router's index (MiB)": lambda one: one.router.index_bytes / (1 << 20),
    "requests simulated a second": lambda one: one.requests_per_wall_second,
}


def write_cluster_plot(path: Path, reports: Sequence[ClusterReport], title: str) -> None:
    """Draw all runs into one file; its suffix names the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: There is no such format.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed for a file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for panel, (label, value) in zip(axes.flat, _PANELS.items(), strict=True):
        for policy in dict.fromkeys(one.policy for one in reports):
            runs = sorted(
                (one for one in reports if one.policy == policy), key=lambda one: one.instances
            )
            sizes = [one.instances for one in runs]
            panel.plot(sizes, [value(one) for one in runs], marker="o", label=policy)
        panel.set_xscale("log")
        panel.set_xlabel("instances")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        if label == _TTFT:  # one instance too few is orders of magnitude
            panel.set_yscale("symlog", linthresh=0.01)
    axes.flat[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
