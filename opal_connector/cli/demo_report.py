"""What `opal demo` says about its runs: the figures, the table, and what is wrong with them."""

import statistics
from typing import Final

import msgspec

from opal_connector.cli.demo_runs import Measurement
from opal_connector.cli.machine import MachineFacts

HIT_FRACTION_MIN: Final = 0.95


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. Times are seconds to the first token; several are given by median.

    The blocks are those of vLLM's device: beside Opal, and without a connector.
    """

    cold_ttft_s: float
    warm_ttft_s: float
    device_ttft_s: float
    ttft_ratio: float
    warm_to_device_ratio: float
    prompt_tokens: int
    hit_tokens_by_tier: dict[str, int]
    hit_fraction: float
    outputs_equal: bool
    model: str
    machine: MachineFacts
    warm_ttfts_s: list[float]
    device_ttfts_s: list[float]
    num_gpu_blocks: int | None
    num_gpu_blocks_without_opal: int | None


def summarize(measurement: Measurement, *, model: str, machine: MachineFacts) -> DemoReport:
    """The report of a measurement. Hits are those of the warm run that had the fewest."""
    cold = measurement.cold
    warm = [answer.ttft_seconds for answer in measurement.warm]
    device = [answer.ttft_seconds for answer in measurement.device]
    hits = min(measurement.warm_hits, key=lambda by_tier: sum(by_tier.values()))
    outputs = {(answer.token_ids, answer.text) for answer in measurement.warm + measurement.device}
    warm_s, device_s = statistics.median(warm), statistics.median(device)
    return DemoReport(
        cold_ttft_s=round(cold.ttft_seconds, 4),
        warm_ttft_s=round(warm_s, 4),
        device_ttft_s=round(device_s, 4),
        ttft_ratio=round(cold.ttft_seconds / warm_s, 2),
        warm_to_device_ratio=round(warm_s / device_s, 3),
        prompt_tokens=cold.prompt_tokens,
        hit_tokens_by_tier=hits,
        hit_fraction=round(sum(hits.values()) / cold.prompt_tokens, 4),
        outputs_equal=outputs == {(cold.token_ids, cold.text)},
        model=model,
        machine=machine,
        warm_ttfts_s=[round(seconds, 4) for seconds in warm],
        device_ttfts_s=[round(seconds, 4) for seconds in device],
        num_gpu_blocks=measurement.num_gpu_blocks,
        num_gpu_blocks_without_opal=measurement.num_gpu_blocks_without_opal,
    )


def verdict(report: DemoReport) -> str | None:
    """What is wrong with a report in one sentence, None when the cache did its work."""
    if not report.outputs_equal:
        return "The answers differ: what came from a cache is not what was computed."
    if report.hit_fraction < HIT_FRACTION_MIN:
        return (
            f"Only {report.hit_fraction:.1%} of the prompt came from Opal's tiers; "
            f"at least {HIT_FRACTION_MIN:.0%} should."
        )
    if report.num_gpu_blocks_without_opal not in (None, report.num_gpu_blocks):
        return (
            f"The device has {report.num_gpu_blocks} blocks with Opal and "
            f"{report.num_gpu_blocks_without_opal} without: vLLM's hybrid memory manager is off."
        )
    return None


def show(report: DemoReport, answer: str) -> None:
    """Prints the report for a person."""
    from rich.console import Console
    from rich.table import Table

    tiers = ", ".join(f"{tokens} {tier}" for tier, tokens in report.hit_tokens_by_tier.items())
    table = Table()
    table.add_column(f"{report.prompt_tokens} prompt tokens' KV cache")
    table.add_column("first token, s", justify="right")
    table.add_column("faster than cold", justify="right")
    for name, seconds in (
        ("cold: all of it computed", report.cold_ttft_s),
        ("in vLLM's device prefix cache", report.device_ttft_s),
        (f"in Opal ({tiers or 'nothing hit'})", report.warm_ttft_s),
    ):
        ratio = report.cold_ttft_s / seconds
        table.add_row(name, f"{seconds:.3f}", f"{ratio:.1f} x" if ratio != 1 else "")
    console = Console(highlight=False)
    console.print(table)
    same = "the same tokens every time" if report.outputs_equal else "NOT the same every time"
    console.print(f"{report.hit_fraction:.1%} of the prompt came from Opal; {same}:", markup=False)
    console.print(f"  {' '.join(answer.split())}", markup=False, soft_wrap=True)
