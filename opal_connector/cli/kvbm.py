"""`opal kvbm`: what a cluster holds where, learned from its events as a router learns it.

Standard output has the answer, as a table or with `--json` as JSON; nothing is ever changed at an
instance.
"""

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import click
from rich.live import Live

from opal_connector.cli.errors import FAILURE, USER_MISTAKE, CommandFailure, plain_failures
from opal_connector.cli.kvbm_following import Following, await_settled, follow
from opal_connector.cli.kvbm_output import (
    Rates,
    cluster_facts,
    dump_facts,
    match_facts,
    print_dump,
    print_match,
    print_verify,
    verify_facts,
    watch_tables,
)
from opal_connector.cli.kvbm_prompt import read_tokens
from opal_connector.cli.kvbm_sources import SourceOptions, read_sources, source_options
from opal_connector.cli.kvbm_verify import await_quiet, verify
from opal_connector.cli.numbers import NonNegative
from opal_connector.cli.tiers_output import output_console, print_json
from opal_connector.cluster.request import PrefixRequest

REFRESH_SECONDS: Final = 0.5
NOT_COMPARED: Final = USER_MISTAKE  # the exit code 2

_Result = TypeVar("_Result")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_wait = click.option(
    "--wait",
    "wait_seconds",
    type=NonNegative(),
    default=10.0,
    show_default=True,
    help="Seconds that all sources may take to be known.",
)


@click.group()
def kvbm() -> None:
    """What a cluster holds where: watch it, list it, ask for a prompt, verify it."""


@kvbm.command("watch", short_help="A live table of instances and tiers.")
@source_options
@_as_json
@click.option("--once", is_flag=True, help="Look once, when all sources are known, and end.")
@_wait
def watch(as_json: bool, once: bool, wait_seconds: float, **sources: tuple[str, ...]) -> None:
    """Show instances, their state, tiers, events and load, twice a second, until Ctrl-C.

    With --json one line per look.
    """

    async def look(following: Following, stop: asyncio.Event) -> None:
        if once:
            await await_settled(following, wait_seconds, stop)
        rates = Rates()
        with _screen(is_shown=not as_json and not once) as show:
            while not stop.is_set():
                now = time.monotonic()
                rows = cluster_facts(
                    following.kvbm, following.sources(), rates.look(following.kvbm, now)
                )
                if as_json:
                    click.echo(json.dumps({"at": time.time(), "instances": rows}))
                elif once:
                    output_console().print(watch_tables(rows))
                elif show is not None:
                    show.update(watch_tables(rows), refresh=True)
                if once:
                    return
                await _pause(stop, REFRESH_SECONDS)

    _run(read_sources(**sources), look)


@kvbm.command("dump", short_help="What every instance holds.")
@source_options
@_as_json
@click.option("--blocks", "with_blocks", is_flag=True, help="Every block's hash and parent.")
@_wait
def dump(as_json: bool, with_blocks: bool, wait_seconds: float, **sources: tuple[str, ...]) -> None:
    """Show how many blocks every instance holds by kv group and tier, or all their hashes."""

    async def show(following: Following, stop: asyncio.Event) -> None:
        await _settled(following, wait_seconds, stop)
        rows = dump_facts(following.kvbm, with_blocks=with_blocks)
        if as_json:
            print_json({"places": rows})
        else:
            print_dump(rows, with_blocks=with_blocks)

    _run(read_sources(**sources), show)


@kvbm.command("match", short_help="Who could serve how much of a prompt.")
@source_options
@_as_json
@click.option("--prompt", metavar="TEXT", help="The prompt; needs --tokenizer.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The directory of the model, for --prompt.",
)
@click.option("--tokens", metavar="1,2,3|@FILE", help="The prompt as token ids.")
@click.option("--model", help="Only instances that serve this model.")
@click.option("--lora", help="The adapter's name.")
@click.option("--salt", help="The request's cache_salt.")
@_wait
def match(
    as_json: bool,
    prompt: str | None,
    tokenizer: Path | None,
    tokens: str | None,
    model: str | None,
    lora: str | None,
    salt: str | None,
    wait_seconds: float,
    **sources: tuple[str, ...],
) -> None:
    """Show what every instance could serve of a prompt: on its device, and behind that by tier."""
    token_ids = read_tokens(prompt, tokens, tokenizer)
    request = PrefixRequest(token_ids=token_ids, model=model, lora_name=lora, cache_salt=salt)

    async def ask(following: Following, stop: asyncio.Event) -> None:
        await _settled(following, wait_seconds, stop)
        index = following.kvbm
        facts = match_facts(index.match(request), index.scorer(request), len(token_ids))
        if as_json:
            print_json(facts)
        else:
            print_match(facts)

    _run(read_sources(**sources), ask)


@kvbm.command("verify", short_help="Compare what events told with what instances hold.")
@source_options
@_as_json
@click.option("--seconds", type=NonNegative(), help="Follow so long first.  [till Ctrl-C]")
@click.option(
    "--settle",
    "settle_seconds",
    type=NonNegative(),
    default=30.0,
    show_default=True,
    help="Seconds that the sources may then take to come to rest.",
)
@click.pass_context
def verify_command(
    context: click.Context,
    /,
    as_json: bool,
    seconds: float | None,
    settle_seconds: float,
    **sources: tuple[str, ...],
) -> None:
    """Follow the events for a while, then compare with what the instances really hold.

    The exit code is 1 if anything differs, and 2 if an instance could not be compared.
    """

    async def compare(following: Following, stop: asyncio.Event) -> int:
        began = time.monotonic()
        await _pause(stop, seconds)
        followed = time.monotonic() - began
        await await_quiet(following, settle_seconds)
        report = await verify(following, followed)
        if as_json:
            print_json(verify_facts(report))
        else:
            print_verify(report)
        if report.differences:
            return FAILURE
        return NOT_COMPARED if report.not_compared else 0

    code = _run(read_sources(**sources), compare)
    if code:
        context.exit(code)


# ---- how commands run ----


def _run(
    options: SourceOptions, work: Callable[[Following, asyncio.Event], Awaitable[_Result]]
) -> _Result:
    """Follows the sources while `work` runs; Ctrl-C and SIGTERM set its event, or end it."""

    async def run() -> _Result:
        stop = asyncio.Event()
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            if stop.is_set():
                task.cancel()  # told once already
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        async with follow(options) as following:
            return await work(following, stop)

    try:
        with plain_failures():
            return asyncio.run(run())
    except asyncio.CancelledError as error:
        raise click.Abort from error


async def _pause(stop: asyncio.Event, seconds: float | None) -> None:
    """Until told to stop, or for so long."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


async def _settled(following: Following, seconds: float, stop: asyncio.Event) -> None:
    missing = await await_settled(following, seconds, stop)
    if stop.is_set():
        raise click.Abort
    if missing:
        states = ", ".join(f"{one.name} is {one.state}" for one in missing)
        raise CommandFailure(f"Not all sources are known within {seconds:g} s: {states}.")


def _screen(*, is_shown: bool) -> contextlib.AbstractContextManager[Live | None]:
    """Where the table stands and is drawn anew, or nothing."""
    if not is_shown:
        return contextlib.nullcontext()
    return Live(console=output_console(), auto_refresh=False)
