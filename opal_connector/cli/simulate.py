"""`opal simulate`: a trace through a cluster of any size, in virtual time; no engine runs."""

from collections.abc import Sequence
from typing import Final

import click

from opal_connector.cli.errors import CommandError, plain_failures
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.cli.simulate_output import print_clusters
from opal_connector.cli.trace_options import TraceOptions, trace_options
from opal_connector.cluster.policies import POLICY_NAMES
from opal_connector.simulated_cluster import ClusterReport, ClusterSimulation
from opal_connector.simulation import ReplaySettings, Trace

_MOST_INSTANCES: Final = 1000
_SHARED: Final = "DistributedFS"


@click.command()
@trace_options
@click.option(
    "--instances",
    default="1,10,100,1000",
    show_default=True,
    metavar="N,...",
    help="Sizes of the cluster to compare.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME,...",
    help=f"Policies of the router to compare: {', '.join(POLICY_NAMES)}.  [default: Balanced]",
)
@click.option(
    "--shared-tier",
    is_flag=True,
    help="All instances mount one DistributedFS, of the size that --tier says.  "
    "[default: one each]",
)
@click.option("--seed", type=int, default=42, show_default=True, help="For policies that draw.")
def simulate(
    options: TraceOptions,
    instances: str,
    policies: tuple[str, ...],
    shared_tier: bool,
    seed: int,
) -> None:
    """Serve the requests of TRACE by a cluster, in virtual time.

    TRACE and the options of instances are those of `opal replay`, whose hits one instance has.
    Every instance has the books of a running engine, its events feed the index of the router, and
    the router decides by its policies. Times count KV traffic, and prefill and decode if their
    speed is given; with --prefill-concurrency 1 prompts of an instance wait for each other.
    """
    sizes = parse_instances(instances)
    names = parse_router_policies(policies)
    options.need_matplotlib()
    with plain_failures("replay"):
        trace, settings = options.load()
        if shared_tier and _SHARED not in settings.config.kvc_tiers:
            raise CommandError(
                f"--shared-tier: found no tier {_SHARED}, allowed: with --tier {_SHARED}=CAPACITY."
            )
        reports = _run_all(trace, settings, sizes, names, is_shared=shared_tier, seed=seed)
        options.write(trace, settings, seed=seed, simulations=reports)
        if options.plot_file is not None:
            from opal_connector.cli.simulate_plot import write_cluster_plot

            options.draw(lambda path, title: write_cluster_plot(path, reports, title))
    print_clusters(reports)


def parse_instances(text: str) -> list[int]:
    """The sizes of a cluster, each once, in the order given."""
    sizes: list[int] = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not 1 <= int(part) <= _MOST_INSTANCES:
            raise CommandError(
                f"--instances: found {text!r}, allowed: numbers from 1 to {_MOST_INSTANCES}, "
                "separated by commas."
            )
        if int(part) not in sizes:
            sizes.append(int(part))
    return sizes


def parse_router_policies(texts: Sequence[str]) -> list[str]:
    """The policies of all `--policy` options, each once, spelled as the router does."""
    known = {name.lower(): name for name in POLICY_NAMES}
    names: list[str] = []
    for text in (part.strip() for option in texts or ("Balanced",) for part in option.split(",")):
        name = known.get(text.lower())
        if name is None:
            raise CommandError(f"--policy: found {text!r}, allowed: {', '.join(POLICY_NAMES)}.")
        if name not in names:
            names.append(name)
    return names


def _run_all(
    trace: Trace,
    settings: ReplaySettings,
    sizes: Sequence[int],
    policies: Sequence[str],
    *,
    is_shared: bool,
    seed: int,
) -> list[ClusterReport]:
    reporter = ConsoleReporter()
    reports = []
    count = len(trace.requests)
    for policy in policies:
        for size in sizes:
            label = f"{policy}, {size} instance{'s' * (size > 1)}: {count} requests"
            with reporter.step(label, count) as more:
                simulation = ClusterSimulation(
                    trace,
                    settings,
                    instances=size,
                    policy=policy,
                    is_shared=is_shared,
                    seed=seed,
                )
                reports.append(simulation.run(more))
    return reports
