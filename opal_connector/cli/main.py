"""The entry point `opal`: finds the subcommand and imports that one only."""

import importlib
from importlib import metadata
from typing import Final, NamedTuple

import click
from typing_extensions import override


class CommandPlace(NamedTuple):
    """Where a subcommand lives, and what `opal --help` says of it without importing it."""

    module: str
    attribute: str
    help: str


COMMANDS: Final = {
    "bench": CommandPlace(
        "opal_connector.cli.bench.commands",
        "bench",
        "Measure an OpenAI-compatible endpoint under a workload that shares prefixes.",
    ),
    "demo": CommandPlace(
        "opal_connector.cli.demo", "demo", "See a long prompt answered from the cache, for real."
    ),
    "kvbm": CommandPlace(
        "opal_connector.cli.kvbm", "kvbm", "Watch what a cluster holds where, and verify it."
    ),
    "models": CommandPlace(
        "opal_connector.cli.models", "models", "Get or make small models to try the cache with."
    ),
    "replay": CommandPlace(
        "opal_connector.cli.replay",
        "replay",
        "Find out what a trace of requests would hit in tiers of a given size.",
    ),
    "router": CommandPlace(
        "opal_connector.cli.router",
        "router",
        "One OpenAI endpoint in front of several instances; requests go where they are cheapest.",
    ),
    "serve": CommandPlace(
        "opal_connector.cli.serve",
        "serve",
        "Run several engines and one OpenAI endpoint before them, from one file.",
    ),
    "simulate": CommandPlace(
        "opal_connector.cli.simulate",
        "simulate",
        "Find out how many instances behind a router would serve a trace, up to 1,000 of them.",
    ),
    "tiers": CommandPlace(
        "opal_connector.cli.tiers", "tiers", "Look into a tier's directory, verify it, clean it."
    ),
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are run."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, without importing anything."""
        return sorted(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the subcommand, or None when there is no such name."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        command = getattr(importlib.import_module(place.module), place.attribute)
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of subcommands from the table above."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].help) for name in self.list_commands(ctx)])


def _show_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    try:
        version = metadata.version("opal-connector")
    except metadata.PackageNotFoundError:
        version = "(a source tree, not installed)"
    click.echo(f"opal {version}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def opal() -> None:
    """Tools around opal_connector, the tiered KV cache for vLLM."""


def main() -> None:
    """Runs the command line and leaves the process with its exit code."""
    opal(prog_name="opal")


if __name__ == "__main__":
    main()
