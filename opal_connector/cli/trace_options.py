"""The options of all commands that send a trace through simulated instances."""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from opal_connector.cli.errors import CommandError, CommandFailure
from opal_connector.cli.numbers import NonNegative
from opal_connector.cli.replay_options import (
    make_settings,
    parse_tier,
    prefill_speed,
    size_bytes,
)
from opal_connector.simulation import ReplaySettings, Trace, TraceError, read_trace

_FILE: Final = click.Path(dir_okay=False, path_type=Path)
_DECORATORS: Final = (
    click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option(
        "--tier",
        "tiers",
        multiple=True,
        metavar="NAME=CAPACITY[,...]",
        help="A tier of an instance, fastest first, with its size (8GiB, or 1000blocks), and after "
        "commas policy=, write=, admission=, eviction_threshold=, eviction_target=, "
        "bandwidth_GBps=, latency_nsec= or concurrency= (of the device).  "
        "[default: CPUMemory=8GiB]",
    ),
    click.option("--config", "config_file", type=_FILE, help="A JSON or YAML file as opal_config."),
    click.option(
        "--tokens-per-id", type=click.IntRange(1), help="Of a hash id.  [default: what fits]"
    ),
    click.option("--multiplier-to-sec", type=NonNegative(), default=0.001, show_default=True),
    click.option(
        "--bytes-per-token", default="128KiB", show_default=True, help="Of KV, on one rank."
    ),
    click.option("--chunk-size", type=click.IntRange(1), help="Tokens a chunk.  [default: one id]"),
    click.option(
        "--device-blocks",
        type=click.IntRange(0),
        default=0,
        help="vLLM's own prefix cache.  [default: none]",
    ),
    click.option(
        "--prefill-tokens-per-s",
        type=NonNegative(),
        default=0.0,
        help="Speed of a prefill.  [default: it takes no time]",
    ),
    click.option(
        "--model-parameters",
        type=NonNegative(),
        help="Take the speed of a prefill from the model instead: two FLOPs a parameter and token.",
    ),
    click.option(
        "--tflops",
        type=NonNegative(),
        default=989.5,
        show_default=True,
        help="What an instance computes, for --model-parameters.",
    ),
    click.option(
        "--decode-tokens-per-s",
        type=NonNegative(),
        default=0.0,
        help="Speed of each decode.  [default: it takes no time]",
    ),
    click.option(
        "--prefill-concurrency",
        type=click.IntRange(0),
        default=0,
        help="Prompts that an instance computes at once, others queue.  [default: any number]",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(0),
        default=0,
        help="Requests that an instance serves at once, others queue.  [default: any number]",
    ),
    click.option("--sequential", is_flag=True, help="One request after the other, no timestamps."),
    click.option("--limit", type=click.IntRange(1), help="Only so many requests."),
    click.option("--json", "json_file", type=_FILE, help="Write everything to this file."),
    click.option("--plot", "plot_file", type=_FILE, help="Draw it; needs matplotlib."),
)


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a person gave, by the names of the options."""

    trace: Path
    tiers: tuple[str, ...]
    config_file: Path | None
    tokens_per_id: int | None
    multiplier_to_sec: float
    bytes_per_token: str
    chunk_size: int | None
    device_blocks: int
    prefill_tokens_per_s: float
    model_parameters: float | None
    tflops: float
    decode_tokens_per_s: float
    prefill_concurrency: int
    max_num_seqs: int
    sequential: bool
    limit: int | None
    json_file: Path | None
    plot_file: Path | None

    def load(self) -> tuple[Trace, ReplaySettings]:
        """The trace, and how an instance is to serve it.

        Raises:
            CommandError: A line of the trace or an option is refused.
        """
        tiers = [parse_tier(text) for text in self.tiers]
        token_bytes = size_bytes("--bytes-per-token", self.bytes_per_token)
        speed = prefill_speed(
            self.prefill_tokens_per_s, parameters=self.model_parameters, tflops=self.tflops
        )
        try:
            trace = read_trace(
                self.trace,
                tokens_per_id=self.tokens_per_id,
                seconds_per_unit=self.multiplier_to_sec,
                limit=self.limit,
            )
        except TraceError as error:
            raise CommandError(f"{self.trace.name}: {error}.") from None
        if trace.left_out:
            click.echo(f"{trace.left_out} requests without a prompt are left out", err=True)
        settings = make_settings(
            tiers,
            config_file=self.config_file,
            block_bytes=token_bytes * trace.block_tokens,
            bytes_per_token=token_bytes,
            chunk_tokens=self.chunk_size,
            device_blocks=self.device_blocks,
            prefill_tokens_per_second=speed,
            decode_tokens_per_second=self.decode_tokens_per_s,
            prefill_concurrency=self.prefill_concurrency,
            max_num_seqs=self.max_num_seqs,
            is_sequential=self.sequential,
        )
        return trace, settings

    def need_matplotlib(self) -> None:
        """Say what is missing before the work, not after it.

        Raises:
            CommandFailure: A plot is asked for and cannot be drawn.
        """
        if self.plot_file is not None and importlib.util.find_spec("matplotlib") is None:
            raise CommandFailure(
                "The Python package 'matplotlib' is missing: pip install 'opal-connector[replay]'."
            )

    def write(self, trace: Trace, settings: ReplaySettings, **results: Any) -> None:
        """Write the JSON file, if one is wanted."""
        if self.json_file is None:
            return
        facts = {
            "trace": self.trace.name,
            "block_tokens": trace.block_tokens,
            "settings": settings,
            **results,
        }
        self.json_file.write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")

    def draw(self, plot: Callable[[Path, str], None]) -> None:
        """Have `plot` draw into the file that is wanted, if one is, under the trace's name."""
        if self.plot_file is None:
            return
        try:
            plot(self.plot_file, self.trace.name)
        except ValueError as error:
            raise CommandError(f"--plot: {error}") from None


def trace_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options; it gets them as one `TraceOptions`, before its own."""

    @functools.wraps(command)
    def gathered(**values: Any) -> None:
        given = {name: values.pop(name) for name in TraceOptions.__struct_fields__}
        command(TraceOptions(**given), **values)

    for decorator in reversed(_DECORATORS):
        gathered = decorator(gathered)
    return gathered
