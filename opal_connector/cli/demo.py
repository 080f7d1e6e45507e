"""`opal demo`: a real model answers one long prompt cold, from the device, and from Opal's tiers.

Three times to the first token of the same answer: a prefill, vLLM's own prefix cache, and a tier
of Opal after the device's prefix cache was emptied.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import click
import msgspec

from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.cli.machine import MachineFacts, machine_facts
from opal_connector.cli.models import SMOLLM2_LAYERS, ensure_smollm2
from opal_connector.cli.progress import ConsoleReporter, Reporter
from opal_connector.cli.server_process import ServerPlan, opal_transfer_config, serve
from opal_connector.config import ConfigError, load_config

if TYPE_CHECKING:
    from opal_connector.cli.server_client import Answer, Sample

HIT_FRACTION_MIN: Final = 0.95
_BLOCK_TOKENS: Final = 32
# Below this, the last block of a prompt, which is always computed, is more than 5 % of it.
_PROMPT_TOKENS_MIN: Final = 640
_PROMPT_TOKENS_MAX: Final = 4000
_OUTPUT_TOKENS: Final = 24
_ROUNDS: Final = 3
# Between runs, so that the stores of one do not take a core from the next.
_SETTLE_SECONDS: Final = 0.5
_METRICS_SECONDS_MAX: Final = 3.0
_SERVER_ARGUMENTS: Final = (
    *("--dtype", "float32"),
    *("--block-size", str(_BLOCK_TOKENS)),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    "--enforce-eager",
)
_TIER_CAPACITY: Final = "1GiB"
_QUESTION: Final = "\n\nQuestion: In one sentence, what is the while statement for?\nAnswer:"
_UNRELATED_PROMPT: Final = "Good morning! The weather today is"


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. Times are seconds to the first token; several are given by median."""

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


@dataclass
class Measurement:
    """The answers of one demo, and the prompt tokens that each warm one took from tiers."""

    cold: "Answer"
    device: list["Answer"] = field(default_factory=list)
    warm: list["Answer"] = field(default_factory=list)
    warm_hits: list[dict[str, int]] = field(default_factory=list)


class Client(Protocol):
    """What the demo asks of a server; `ServerClient` is one."""

    def complete(self, prompt: str | list[int], *, max_tokens: int) -> "Answer":
        """A greedy completion."""

    def samples(self) -> list["Sample"]:
        """The server's metrics now."""

    def reset_prefix_cache(self) -> None:
        """Empties the device's prefix cache."""


def demo_prompt(tokenizer_file: Path, token_count: int) -> str:
    """A real text with a question at its end, `token_count` tokens within a few."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    text: str = topics["compound"]
    question_tokens = len(tokenizer.encode(_QUESTION, add_special_tokens=False).ids)
    kept = tokenizer.encode(text, add_special_tokens=False).offsets[: token_count - question_tokens]
    return text[: kept[-1][1]] + _QUESTION


def measure(client: Client, prompt: str, reporter: Reporter) -> Measurement:
    """Runs the prompt cold, then in turn from the device and from Opal's tiers."""
    with reporter.step("warming up with another prompt", total=None):
        client.complete(_UNRELATED_PROMPT, max_tokens=4)
    with reporter.step("cold: computing the whole prompt", total=None):
        measurement = Measurement(client.complete(prompt, max_tokens=_OUTPUT_TOKENS))
    with reporter.step("again from the device, and from Opal", total=2 * _ROUNDS) as advance:
        for _ in range(_ROUNDS):
            time.sleep(_SETTLE_SECONDS)
            measurement.device.append(client.complete(prompt, max_tokens=_OUTPUT_TOKENS))
            advance(1)
            client.reset_prefix_cache()
            time.sleep(_SETTLE_SECONDS)
            answer, hits = _complete_counted(client, prompt)
            measurement.warm.append(answer)
            measurement.warm_hits.append(hits)
            advance(1)
    return measurement


def _complete_counted(client: Client, prompt: str) -> tuple["Answer", dict[str, int]]:
    """An answer, and its prompt tokens by the tier that they came from.

    Raises:
        CommandFailure: vLLM's own counter of external hits disagrees with Opal's.
    """
    before = _external_hits(client.samples())
    answer = client.complete(prompt, max_tokens=_OUTPUT_TOKENS)
    deadline = time.monotonic() + _METRICS_SECONDS_MAX
    while True:
        after = _external_hits(client.samples())
        hits = {tier: after[0][tier] - before[0].get(tier, 0) for tier in after[0]}
        hits = {tier: tokens for tier, tokens in hits.items() if tokens}
        counted = after[1] - before[1]
        # Metrics follow the answer by a step of the engine.
        if (hits and sum(hits.values()) == counted) or time.monotonic() > deadline:
            break
        time.sleep(_SETTLE_SECONDS / 10)
    if sum(hits.values()) != counted:
        raise CommandFailure(
            f"Opal counts {sum(hits.values())} prompt tokens from its tiers and vLLM {counted}."
        )
    return answer, hits


def _external_hits(samples: list["Sample"]) -> tuple[dict[str, int], int]:
    """Hit tokens by Opal's tier, and all that vLLM says came from outside the device."""
    from opal_connector.cli.server_client import sum_by_label

    by_source = sum_by_label(samples, "vllm:prompt_tokens_cached_by_source_total", "source")
    external = sum(tokens for source, tokens in by_source.items() if source != "device")
    return sum_by_label(samples, "vllm:opal_hit_tokens_total", "tier"), external


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


@contextlib.contextmanager
def _log_file(chosen: Path | None) -> Iterator[Path]:
    """Where the server logs: the chosen file, else one that stays only when something failed."""
    if chosen is not None:
        yield chosen
        return
    with tempfile.NamedTemporaryFile(prefix="opal-demo-", suffix=".log", delete=False) as log:
        path = Path(log.name)
    yield path
    path.unlink()


def _writable(_ctx: click.Context, _parameter: click.Parameter, path: Path | None) -> Path | None:
    """Refuses a file in a directory that is not there, before minutes are spent."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(f"There is no directory {path.parent} to write {path.name} in.")
    return path


@click.command()
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    metavar="FILE",
    help="Write the figures to a file, too.",
)
@click.option(
    "--layers",
    type=click.IntRange(1, SMOLLM2_LAYERS),
    help="Keep the model's first layers only: fast, and its text is noise.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(_PROMPT_TOKENS_MIN, _PROMPT_TOKENS_MAX),
    default=2000,
    show_default=True,
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    default=("CPUMemory",),
    show_default=True,
    help="A tier, fastest first; may be repeated.",
)
@click.option(
    "--server-log",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_writable,
    metavar="FILE",
    help="Keep the server's log here.",
)
def demo(
    json_file: Path | None,
    layers: int | None,
    prompt_tokens: int,
    tiers: tuple[str, ...],
    server_log: Path | None,
) -> None:
    """Serve a small real model on the CPU and see a long prompt hit Opal's tiers."""
    extra = {"kvc_tiers": list(tiers), **{tier: {"capacity_GB": _TIER_CAPACITY} for tier in tiers}}
    try:
        load_config({"kvc_tiers": list(tiers)})
    except ConfigError as error:
        raise CommandError(f"{error}.") from error
    reporter = ConsoleReporter()
    with plain_failures(extra="demo"), _log_file(server_log) as log_path:
        from opal_connector.cli.server_client import ServerClient

        model = ensure_smollm2(layers, reporter=reporter)
        prompt = demo_prompt(model / "tokenizer.json", prompt_tokens)
        plan = ServerPlan(
            model=model,
            log_path=log_path,
            transfer_config=opal_transfer_config(extra),
            arguments=_SERVER_ARGUMENTS,
            environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        )
        with serve(plan, reporter) as server, ServerClient(server.url) as client:
            measurement = measure(client, prompt, reporter)
        report = summarize(measurement, model=model.name, machine=machine_facts())
        if json_file is not None:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        show(report, measurement.cold.text)
        if complaint := verdict(report):
            raise CommandFailure(f"{complaint} The server's log is {log_path}.")
