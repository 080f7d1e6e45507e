"""`opal demo`: a real model answers one long prompt cold, from the device, and from Opal's tiers.

Three times to the first token of the same answer: a prefill, vLLM's own prefix cache, and a tier
of Opal after the device's prefix cache was emptied, after vLLM was killed, or on another server.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from opal_connector.cli.demo_report import show, summarize, verdict
from opal_connector.cli.demo_runs import (
    Measurement,
    demo_prompt,
    device_blocks,
    measure,
    measure_cold,
    measure_elsewhere,
)
from opal_connector.cli.demo_stores import DEMO_STORES, DemoStore, running_store
from opal_connector.cli.errors import CommandError, CommandFailure, plain_failures
from opal_connector.cli.machine import machine_facts
from opal_connector.cli.model_library import (
    SMOLLM2,
    SMOLLM2_LAYERS,
    ensure_named,
    ensure_smollm2,
    model_names,
)
from opal_connector.cli.progress import ConsoleReporter, Reporter
from opal_connector.cli.server_process import ServerPlan, kill, opal_transfer_config, serve
from opal_connector.config import TIER_NAMES, ConfigError, OpalConfig, load_config

# Below this, the last block of a prompt, which is always computed, is more than 5 % of it.
_PROMPT_TOKENS_MIN: Final = 640
_PROMPT_TOKENS_MAX: Final = 4000
_SERVER_ARGUMENTS: Final = (
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    "--enforce-eager",
)
_TIER_CAPACITY: Final = "1GiB"
_DEFAULT_TIERS: Final[Mapping[str | None, str]] = {
    None: "CPUMemory",
    "restart": "CPUMemory,LocalNVMe",
    "share": "CPUMemory,DistributedFS",
}


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


_STANDARD_OUTPUT = Path("-")


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
    is_flag=False,
    flag_value=_STANDARD_OUTPUT,
    callback=_writable,
    metavar="[FILE]",
    help="Write the figures to a file, too; without a name print them, and nothing else.",
)
@click.option(
    "--model",
    "model_name",
    type=click.Choice(model_names()),
    metavar="NAME",
    help=f"One of `opal models list`. [default: {SMOLLM2}]",
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
    "--tiers",
    metavar="NAMES",
    help="The tiers, fastest first, with commas. [default: CPUMemory; with --restart "
    "CPUMemory,LocalNVMe; with --share CPUMemory,DistributedFS]",
)
@click.option(
    "--restart", "scene", flag_value="restart", help="Kill vLLM between the cold and the warm run."
)
@click.option(
    "--share",
    "scene",
    flag_value="share",
    help="Two servers on one directory: cold on one, warm on the other.",
)
@click.option(
    "--tier",
    "store_kind",
    type=click.Choice(list(DEMO_STORES)),
    help="With --share: through such a store, which the demo runs, in place of the directory.",
)
@click.option(
    "--cluster",
    "scene",
    flag_value="cluster",
    help="Two servers behind a router: conversations of several people by three policies.",
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
    model_name: str | None,
    layers: int | None,
    prompt_tokens: int,
    tiers: str | None,
    scene: str | None,
    store_kind: str | None,
    server_log: Path | None,
) -> None:
    """Serve a small real model on the CPU and see a long prompt hit Opal's tiers."""
    if store_kind is not None and (scene != "share" or tiers is not None):
        raise CommandError("--tier: it goes with --share, and without --tiers.")
    if scene == "cluster":
        if model_name is not None:
            raise CommandError(f"--model: --cluster runs {SMOLLM2}; leave it out.")
        _demonstrate_cluster(json_file, layers, server_log, tiers=tiers)
        return
    names = tuple((tiers or _DEFAULT_TIERS[scene]).split(","))
    reporter = ConsoleReporter()
    with (
        plain_failures(extra="demo"),
        _log_file(server_log) as log_path,
        tempfile.TemporaryDirectory(prefix="opal-demo-") as directory,
        _store(store_kind, Path(directory), reporter) as store,
    ):
        if store is not None:
            names = ("CPUMemory", store.tier)
        extra = _settings(names, Path(directory), store)
        try:
            load_config(extra)
        except ConfigError as error:
            raise CommandError(f"{error}.") from error
        import opal_connector.cli.server_client  # noqa: F401 - what is missing is told first

        model, settings = ensure_named(model_name or SMOLLM2, layers, reporter=reporter)
        prompt = demo_prompt(model / "tokenizer.json", prompt_tokens)
        plan = ServerPlan(
            model=model,
            log_path=log_path,
            transfer_config=opal_transfer_config(extra),
            arguments=(*settings.arguments(), *_SERVER_ARGUMENTS),
            environment={"VLLM_CPU_KVCACHE_SPACE": "1", **(store.environment if store else {})},
        )
        measurement = _SCENES[scene](plan, prompt, names, reporter)
        if json_file is not None:
            measurement.num_gpu_blocks_without_opal = _blocks_without_opal(plan, reporter)
        report = summarize(measurement, model=model.name, machine=machine_facts())
        if json_file is not None:
            _write(json_file, report)
        if json_file != _STANDARD_OUTPUT:
            show(report, measurement.cold.text)
        if complaint := verdict(report):
            raise CommandFailure(f"{complaint} The server's log is {log_path}.")


def _demonstrate_cluster(
    json_file: Path | None, layers: int | None, server_log: Path | None, *, tiers: str | None
) -> None:
    if tiers is not None:
        raise CommandError("--tiers: the tiers of --cluster are fixed; leave it out.")
    reporter = ConsoleReporter()
    with (
        plain_failures(extra="demo,router"),
        _log_file(server_log) as log_path,
        tempfile.TemporaryDirectory(prefix="opal-demo-") as directory,
    ):
        from opal_connector.cli import demo_cluster, demo_cluster_report

        model = ensure_smollm2(layers, reporter=reporter)
        results = demo_cluster.run_cluster(
            model, Path(directory), log_path, demo_cluster.CONVERSATIONS, reporter
        )
        report = demo_cluster_report.summarize_cluster(
            results,
            instance_count=demo_cluster.INSTANCE_COUNT,
            model=model.name,
            machine=machine_facts(),
        )
        if json_file is not None:
            _write(json_file, report)
        if json_file != _STANDARD_OUTPUT:
            demo_cluster_report.show_cluster(report)
        if wrong := demo_cluster_report.complaint(report):
            raise CommandFailure(f"{wrong} The servers' log is {log_path}.")


def _write(json_file: Path, report: msgspec.Struct) -> None:
    text = msgspec.json.format(msgspec.json.encode(report)).decode()
    if json_file == _STANDARD_OUTPUT:
        print(text)
    else:
        json_file.write_text(f"{text}\n")


@contextlib.contextmanager
def _store(kind: str | None, directory: Path, reporter: Reporter) -> Iterator[DemoStore | None]:
    if kind is None:
        yield None
        return
    with running_store(kind, directory, reporter) as store:
        yield store


def _settings(
    names: tuple[str, ...], directory: Path, store: DemoStore | None = None
) -> dict[str, Any]:
    """A small capacity for every tier, and a directory where it needs one."""
    settings: dict[str, Any] = {"kvc_tiers": list(names)}
    for name in names:
        if store is not None and name == store.tier:
            settings[name] = store.settings
            continue
        settings[name] = {"capacity_GB": _TIER_CAPACITY}
        if name in TIER_NAMES and OpalConfig().keyed_tier(name) is not None:
            settings[name]["path"] = str(directory / name)
    return {name: value for name, value in settings.items() if name in {"kvc_tiers", *TIER_NAMES}}


def _one_server(
    plan: ServerPlan, prompt: str, tiers: tuple[str, ...], reporter: Reporter
) -> Measurement:
    del tiers
    from opal_connector.cli.server_client import ServerClient

    with serve(plan, reporter) as server, ServerClient(server.url) as client:
        return measure(client, prompt, reporter)


def _blocks_without_opal(plan: ServerPlan, reporter: Reporter) -> int | None:
    """How many blocks the same model has on the device when there is no connector.

    A connector that vLLM does not trust with several kv groups costs a hybrid model most of them.
    """
    from opal_connector.cli.server_client import ServerClient

    log_path = plan.log_path.with_suffix(".without.log")
    plain = dataclasses.replace(plan, transfer_config=None, log_path=log_path)
    with serve(plain, reporter) as server, ServerClient(server.url) as client:
        count = device_blocks(client.samples())
    log_path.unlink(missing_ok=True)
    return count


def _killed_and_restarted(
    plan: ServerPlan, prompt: str, tiers: tuple[str, ...], reporter: Reporter
) -> Measurement:
    from opal_connector.cli.server_client import ServerClient

    with serve(plan, reporter) as server, ServerClient(server.url) as client:
        cold = measure_cold(client, prompt, tiers, reporter)
        kill(server)
    with serve(plan, reporter) as server, ServerClient(server.url) as client:
        return measure_elsewhere(client, prompt, cold, reporter)


def _two_servers(
    plan: ServerPlan, prompt: str, tiers: tuple[str, ...], reporter: Reporter
) -> Measurement:
    from opal_connector.cli.server_client import ServerClient

    other = dataclasses.replace(plan, log_path=plan.log_path.with_suffix(".second.log"))
    with (
        serve(plan, reporter) as first,
        serve(other, reporter) as second,
        ServerClient(first.url) as writer,
        ServerClient(second.url) as reader,
    ):
        cold = measure_cold(writer, prompt, tiers, reporter)
        measurement = measure_elsewhere(reader, prompt, cold, reporter)
    other.log_path.unlink(missing_ok=True)
    return measurement


_SCENES: Final[Mapping[str | None, Callable[..., Measurement]]] = {
    None: _one_server,
    "restart": _killed_and_restarted,
    "share": _two_servers,
}
