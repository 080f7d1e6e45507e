"""`opal replay`: what a trace of requests would hit in tiers of a given size; no engine runs."""

import importlib.util
from pathlib import Path

import click
import msgspec

from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.cli.numbers import NonNegative
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.cli.replay_options import (
    fixed_tiers,
    make_settings,
    parse_policies,
    parse_tier,
    size_bytes,
)
from opal_connector.cli.replay_output import print_reports
from opal_connector.simulation import (
    BELADY,
    Replay,
    ReplayReport,
    ReplaySettings,
    Trace,
    TraceError,
    read_trace,
    replay_belady,
)

_file = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME=CAPACITY[,...]",
    help="A tier, fastest first, with its size (8GiB, or 1000blocks), and after commas policy=, "
    "write=, admission=, eviction_threshold=, eviction_target=, bandwidth_GBps=, latency_nsec= or "
    "concurrency= (of the device).  [default: CPUMemory=8GiB]",
)
@click.option("--config", "config_file", type=_file, help="A JSON or YAML file as opal_config.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME,...",
    help="Eviction policies to compare, in every tier without its own; Belady is the bound.",
)
@click.option("--tokens-per-id", type=click.IntRange(1), help="Of a hash id.  [default: what fits]")
@click.option("--multiplier-to-sec", type=NonNegative(), default=0.001, show_default=True)
@click.option("--bytes-per-token", default="128KiB", show_default=True, help="Of KV, on one rank.")
@click.option("--chunk-size", type=click.IntRange(1), help="Tokens a chunk.  [default: one id]")
@click.option("--device-blocks", type=click.IntRange(0), default=0, help="vLLM's own prefix cache.")
@click.option("--prefill-tokens-per-s", type=NonNegative(), default=0.0)
@click.option("--decode-tokens-per-s", type=NonNegative(), default=0.0)
@click.option("--sequential", is_flag=True, help="One request after the other, no timestamps.")
@click.option("--limit", type=click.IntRange(1), help="Only so many requests.")
@click.option("--json", "json_file", type=_file, help="Write everything to this file.")
@click.option("--plot", "plot_file", type=_file, help="Draw it; needs matplotlib.")
def replay(  # noqa: PLR0913 - one parameter per option
    trace: Path,
    tiers: tuple[str, ...],
    config_file: Path | None,
    policies: tuple[str, ...],
    tokens_per_id: int | None,
    multiplier_to_sec: float,
    bytes_per_token: str,
    chunk_size: int | None,
    device_blocks: int,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float,
    sequential: bool,
    limit: int | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Replay the requests of TRACE through the books of Opal, in virtual time.

    TRACE has JSON lines, compressed with gzip or not: timestamp, input_length, output_length,
    hash_ids. No byte is stored; placement, eviction, copies and moves are those of a running
    engine. Times count KV traffic, and prefill and decode if their speed is given.
    """
    wanted = parse_policies(policies)
    options = [parse_tier(text) for text in tiers]
    token_bytes = size_bytes("--bytes-per-token", bytes_per_token)
    _need_matplotlib(plot_file)
    with plain_failures("replay"):
        try:
            requests = read_trace(
                trace,
                tokens_per_id=tokens_per_id,
                seconds_per_unit=multiplier_to_sec,
                limit=limit,
            )
        except TraceError as error:
            raise CommandError(f"{trace.name}: {error}.") from None
        settings = make_settings(
            options,
            config_file=config_file,
            block_bytes=token_bytes * requests.block_tokens,
            bytes_per_token=token_bytes,
            chunk_tokens=chunk_size,
            device_blocks=device_blocks,
            prefill_tokens_per_second=prefill_tokens_per_s,
            decode_tokens_per_second=decode_tokens_per_s,
            is_sequential=sequential,
        )
        reports = _run_all(requests, settings, wanted, fixed_tiers(options))
        if json_file is not None:
            facts = {
                "trace": trace.name,
                "block_tokens": requests.block_tokens,
                "settings": settings,
                "replays": reports,
            }
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        if plot_file is not None:
            _plot(plot_file, reports, trace.name)
    print_reports(reports)


def _run_all(
    trace: Trace, settings: ReplaySettings, policies: list[str], fixed: frozenset[str]
) -> list[ReplayReport]:
    reporter = ConsoleReporter()
    reports = []
    for policy in policies or [""]:
        label = policy or _configured(settings)
        with reporter.step(f"{label}: {len(trace.requests)} requests", len(trace.requests)) as more:
            if policy == BELADY:
                reports.append(replay_belady(trace, settings, more))
                continue
            chosen = settings.with_policy(policy, keep=fixed) if policy else settings
            reports.append(Replay(trace, chosen).run(label, more))
    return reports


def _configured(settings: ReplaySettings) -> str:
    """The policies of the tiers, the same one said once."""
    names = (settings.config.tier(name).eviction_policy for name in settings.config.kvc_tiers)
    return "/".join(dict.fromkeys(names)) or "no tiers"


def _need_matplotlib(plot_file: Path | None) -> None:
    """Say what is missing before the work, not after it."""
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandFailure(
            "The Python package 'matplotlib' is missing: pip install 'opal-connector[replay]'."
        )


def _plot(path: Path, reports: list[ReplayReport], title: str) -> None:
    from opal_connector.cli.replay_plot import write_plot

    try:
        write_plot(path, reports, title)
    except ValueError as error:
        raise CommandError(f"--plot: {error}") from None
