"""`opal bench`: drives an OpenAI-compatible endpoint with a workload and says what came of it."""

import asyncio
import gc
import importlib.util
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from opal_connector.cli.bench import (
    BenchResult,
    ExponentialReqRate,
    OtelWorkload,
    RAGWorkload,
    SC25Workload,
    Sessions,
    TraceWorkload,
    UniformReqRate,
    Vocabulary,
    Workload,
    WorkloadError,
)
from opal_connector.cli.bench.options import common_options, workload_options
from opal_connector.cli.bench.output import table
from opal_connector.cli.bench.summary import BenchSummary, summarize
from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.simulation import TraceError

if TYPE_CHECKING:
    from opal_connector.cli.bench.client import Target

WORKLOADS: Final[tuple[type[Workload], ...]] = (
    UniformReqRate,
    ExponentialReqRate,
    Sessions,
    RAGWorkload,
    SC25Workload,
    TraceWorkload,
    OtelWorkload,
)
_COLLECT_AFTER: Final = 100_000  # objects more than before


class BenchReport(msgspec.Struct, kw_only=True):
    """What `--json` writes: the figures of the table, and everything they were made from."""

    summary: BenchSummary
    run: BenchResult


@click.group()
def bench() -> None:
    """Measure an OpenAI-compatible endpoint under a workload.

    The endpoint may be vLLM, `opal router` or any other. Answers are streamed, so that times of
    tokens are real.
    """


def _add(workload: type[Workload]) -> None:
    text = (workload.__doc__ or "").strip()

    def run_it(**options: Any) -> None:
        _bench(workload, options)

    bench.add_command(
        click.Command(
            workload.kind,
            params=[*workload_options(workload), *common_options()],
            callback=run_it,
            help=text,
            short_help=text.splitlines()[0],
        )
    )


def _bench(kind: type[Workload], options: dict[str, Any]) -> None:
    json_file, plot_file = options.pop("json_file"), options.pop("plot_file")
    _need_matplotlib(plot_file)
    vocabulary = Vocabulary(end=options.pop("vocab_size"))
    names = {field.name for field in msgspec.structs.fields(kind)}
    parameters = {name: options.pop(name) for name in list(options) if name in names}
    with plain_failures("bench"):
        try:
            workload = kind(**parameters)
            result = _run(workload, _target(options), vocabulary)
        except WorkloadError as error:
            raise CommandError(_as_option(str(error), names)) from None
        except TraceError as error:
            raise CommandError(f"{parameters['trace_file'].name}: {error}.") from None
        report = BenchReport(summary=summarize(result), run=result)
        click.echo(table(report.summary))  # first: a file that cannot be written costs no figure
        if json_file is not None:
            json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        if plot_file is not None:
            _plot(plot_file, result)
    if result.is_stopped:
        raise click.Abort
    if not report.summary.successful_requests:
        raise CommandFailure(_why(result))


def _as_option(sentence: str, fields: set[str]) -> str:
    """The sentence about a field, as one about its option."""
    name, colon, rest = sentence.partition(":")
    if name in fields:
        name = f"--{name.replace('_', '-')}"
    return f"{name}{colon}{rest}."


def _why(result: BenchResult) -> str:
    if not result.requests:
        return "No request was sent."
    first = result.requests[0]
    return f"No request succeeded; the first one failed with {first.error}: {first.error_detail}"


def _target(options: Mapping[str, Any]) -> "Target":
    from opal_connector.cli.bench.client import Target

    given = dict(options)
    key = given.pop("api_key_env")
    if key is not None:
        given["headers"] = {"Authorization": f"Bearer {key}", **given["headers"]}
    return Target(**given)


def _run(workload: Workload, target: "Target", vocabulary: Vocabulary) -> BenchResult:
    from opal_connector.cli.bench.driver import run

    count = workload.request_count
    label = f"{workload.kind}: {'' if count is None else f'{count} '}requests to {target.base}"
    gc.collect()
    gc.freeze()
    # A collection in between would be measured as the server's time.
    gc.set_threshold(_COLLECT_AFTER, 50, 100)
    with (
        ConsoleReporter().step(label, count) as advance,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):

        async def until_interrupted() -> BenchResult:
            return await run(
                workload,
                target,
                vocabulary=vocabulary,
                on_record=lambda _record: advance(1),
                stop=_interruption(),
            )

        return runner.run(until_interrupted())


def _interruption() -> asyncio.Event:
    """Set by the first Ctrl-C, so that what was measured is shown; a second one ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    if threading.current_thread() is threading.main_thread():
        loop.add_signal_handler(signal.SIGINT, interrupt)
    return stop


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Of uvloop's loop, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    make: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return make


def _need_matplotlib(plot_file: Path | None) -> None:
    """Says what is missing before the work, not after it."""
    if plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandFailure(
            "The Python package 'matplotlib' is missing: pip install 'opal-connector[replay]'."
        )


def _plot(path: Path, result: BenchResult) -> None:
    from opal_connector.cli.bench.plot import write_plot

    try:
        write_plot(path, result)
    except ValueError as error:
        raise CommandError(f"--plot: {error}") from None


for _workload in WORKLOADS:
    _add(_workload)
