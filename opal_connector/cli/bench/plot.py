"""The picture of `opal bench`: how soon first tokens came, and what happened when."""

from pathlib import Path

from opal_connector.cli.bench.result import BenchResult


def write_plot(path: Path, result: BenchResult) -> None:
    """Draws one run into a file, whose suffix names the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: There is no such format.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed for a file
    from matplotlib import pyplot as plt

    figure, (distribution, timeline) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for label, times in _ttft_by_part(result).items():
        shares = [100 * (place + 1) / len(times) for place in range(len(times))]
        distribution.step([1000 * one for one in sorted(times)], shares, where="post", label=label)
    distribution.set_xlabel("time to first token (ms)")
    distribution.set_ylabel("requests (%)")
    distribution.set_ylim(0, 100)
    if distribution.lines:
        distribution.legend()
    for label, is_good in (("answered", True), ("failed", False)):
        chosen = [
            (place, one) for place, one in enumerate(result.requests) if one.is_success == is_good
        ]
        if not chosen:
            continue
        timeline.hlines(
            y=[place for place, _ in chosen],
            xmin=[one.sent_seconds for _, one in chosen],
            xmax=[one.end_seconds for _, one in chosen],
            color="tab:blue" if is_good else "tab:red",
            linewidth=1,
            label=label,
        )
    firsts = [
        (one.sent_seconds + one.token_seconds[0], place)
        for place, one in enumerate(result.requests)
        if one.token_seconds
    ]
    timeline.scatter(
        [at for at, _ in firsts],
        [place for _, place in firsts],
        s=6,
        color="k",
        label="first token",
    )
    timeline.set_xlabel("time (s)")
    timeline.set_ylabel("requests, in the order of their end")
    timeline.legend()
    figure.suptitle(f"{result.workload}: {result.model}")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _ttft_by_part(result: BenchResult) -> dict[str, list[float]]:
    """Times to first tokens, by the workload's phases if it has some."""
    parts: dict[str, list[float]] = {}
    for record in result.successes:
        if record.token_seconds:
            parts.setdefault(record.phase or "all", []).append(record.token_seconds[0])
    return parts
