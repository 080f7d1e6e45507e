"""`opal replay`: what a trace of requests would hit in tiers of a given size; no engine runs."""

import click

from opal_connector.cli.errors import plain_failures
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.cli.replay_options import fixed_tiers, parse_policies, parse_tier
from opal_connector.cli.replay_output import print_reports
from opal_connector.cli.trace_options import TraceOptions, trace_options
from opal_connector.simulation import (
    BELADY,
    Replay,
    ReplayReport,
    ReplaySettings,
    Trace,
    replay_belady,
)


@click.command()
@trace_options
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME,...",
    help="Eviction policies to compare, in every tier without its own; Belady is the bound.",
)
def replay(options: TraceOptions, policies: tuple[str, ...]) -> None:
    """Replay the requests of TRACE through the books of Opal, in virtual time.

    TRACE has JSON lines, compressed with gzip or not: timestamp, input_length, output_length,
    hash_ids. No byte is stored; placement, eviction, copies and moves are those of a running
    engine. Times count KV traffic, and prefill and decode if their speed is given.
    """
    wanted = parse_policies(policies)
    options.need_matplotlib()
    with plain_failures("replay"):
        trace, settings = options.load()
        fixed = fixed_tiers([parse_tier(text) for text in options.tiers])
        reports = _run_all(trace, settings, wanted, fixed)
        options.write(trace, settings, replays=reports)
        if options.plot_file is not None:
            from opal_connector.cli.replay_plot import write_plot

            options.draw(lambda path, title: write_plot(path, reports, title))
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
