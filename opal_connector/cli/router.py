"""`opal router`: one OpenAI endpoint in front of several instances."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from logging.config import dictConfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.config import ConfigError

if TYPE_CHECKING:
    from opal_connector.cluster.router.config import RouterConfig
    from opal_connector.cluster.router.siblings import Share

_COLLECT_AFTER: Final = 20_000  # objects more than before
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.command()
@click.option(
    "--config",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A YAML or JSON file; the other options win over it.",
)
@click.option(
    "--instance",
    "instances",
    multiple=True,
    metavar="URL[,tcp://HOST:PORT]",
    help="An engine's server and, behind a comma, its Opal event channel. May be repeated.",
)
@click.option("--host", help="The address to listen at.  [127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65_535), help="The port, 0 for any.  [8000]")
@click.option("--policy", metavar="NAME", help="How to choose an instance.  [Balanced]")
@click.option("--workers", type=int, help="How many processes share the port.  [1]")
@click.option("--check", is_flag=True, help="Only check the configuration.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
def router(
    path: Path | None, instances: tuple[str, ...], check: bool, verbose: bool, **options: Any
) -> None:
    """Serve one OpenAI endpoint in front of several instances.

    SIGTERM and Ctrl-C let what is under way end; a second one does not.
    """
    with plain_failures("router"):
        config = _config(path, instances, options)
        if check:
            click.echo("The configuration is right.")
            return
        dictConfig(_logging("DEBUG" if verbose else "INFO"))
        if config.workers == 1:
            _run(_serve(config))
            return
        from opal_connector.cli.router_processes import RouterProcesses

        asyncio.run(RouterProcesses(config, is_verbose=verbose).run())


def run_process(
    config: "RouterConfig", share: "Share", say: Callable[[str], None], *, is_verbose: bool
) -> None:
    """One of several processes of a router, until SIGTERM; `say` is told where it serves."""
    with plain_failures("router"):
        dictConfig(_logging("DEBUG" if is_verbose else "INFO", f"[{share.number}] "))
        _run(_serve(config, share, say))


def _logging(level: str, who: str = "") -> dict[str, Any]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": who + _FORMAT}},
        "handlers": {"standard error": {"class": "logging.StreamHandler", "formatter": "line"}},
        "root": {"handlers": ["standard error"], "level": level},
    }


def _config(
    path: Path | None, instances: tuple[str, ...], options: dict[str, Any]
) -> "RouterConfig":
    from opal_connector.cluster.router.config import load_router_config, router_config

    try:
        config = load_router_config(path) if path is not None else router_config({})
        given = {name: value for name, value in options.items() if value is not None}
        if given or instances:
            merged = {**msgspec.to_builtins(config), **given}
            merged["instances"] = [*merged["instances"], *map(_instance, instances)]
            config = router_config(merged)
    except ConfigError as error:
        raise CommandError(f"{error}.") from error
    if not config.instances:
        raise CommandError("Name at least one instance, with --instance or in --config.")
    return config


def _instance(text: str) -> dict[str, Any]:
    url, comma, events = text.partition(",")
    return {"url": url, "events": events} if comma else {"url": url}


async def _serve(
    config: "RouterConfig", share: "Share | None" = None, say: Callable[[str], None] | None = None
) -> None:
    from opal_connector.cluster.router.server import RouterServer

    stop, stop_now = asyncio.Event(), asyncio.Event()

    def end() -> None:
        if stop.is_set():
            stop_now.set()
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    # Ctrl-C reaches all processes of a terminal: one of several waits for what its parent makes of
    # it.
    loop.add_signal_handler(signal.SIGINT, end if share is None else lambda: None)
    try:
        server = RouterServer(config, share=share)
    except ConfigError as error:
        raise CommandError(f"{error}.") from error
    try:
        await _start(server)
        if say is None:
            click.echo(f"Serving at {server.url} with {len(config.instances)} instances.")
        else:
            say(server.url)
        _spare_the_collector()
        await stop.wait()
        if not share or share.number == 0:
            click.echo("Ending: what is under way may end, nothing new is taken.", err=True)
        drained = asyncio.ensure_future(server.drain())
        at_once = asyncio.ensure_future(stop_now.wait())
        await asyncio.wait({drained, at_once}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, at_once):
            task.cancel()
    finally:
        await server.close()


def _spare_the_collector() -> None:
    """A request leaves no cycles: looking for them rarely is enough, and what is here stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, 20, 50)


async def _start(server: Any) -> None:
    try:
        await server.start()
    except ConfigError as error:
        raise CommandError(f"{error}.") from error
    except ValueError as error:
        raise CommandFailure(f"An instance cannot be followed: {error}.") from error


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Runs it in uvloop's loop, where there is one."""
    make: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        import uvloop

        make = uvloop.new_event_loop
    except ModuleNotFoundError:
        make = None
    with asyncio.Runner(loop_factory=make) as runner:
        runner.run(work)
