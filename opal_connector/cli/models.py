"""`opal models`: small models to try the cache with, and the functions behind it for tests.

The last line of standard output is the model's directory; everything else goes to standard error.
"""

from pathlib import Path
from typing import Final

import click

from opal_connector.cli import model_store
from opal_connector.cli.errors import CommandError, plain_failures
from opal_connector.cli.model_library import (
    DOWNLOADS,
    SMOLLM2,
    SMOLLM2_LAYERS,
    TINY_LLAMA,
    ensure_download,
    ensure_smollm2,
    ensure_tiny_hybrid,
    ensure_tiny_llama,
    model_names,
)
from opal_connector.cli.progress import ConsoleReporter
from opal_connector.cli.tiny_hybrids import TINY_HYBRIDS
from opal_connector.cli.tiny_models import TinyLlama

__all__ = [
    "SMOLLM2",
    "SMOLLM2_LAYERS",
    "TINY_LLAMA",
    "ensure_smollm2",
    "ensure_tiny_llama",
    "models",
]

_MADE: Final = (TINY_LLAMA, *TINY_HYBRIDS)


@click.group()
def models() -> None:
    """Small models to try the cache with, as Hugging Face directories that vLLM loads."""


_output = click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The model's directory [default: one in the user's cache].",
)
_verify = click.option("--verify", is_flag=True, help="Compare every byte of a ready model.")


@models.command("get", short_help="Download a model and convert it.")
@click.argument("name")
@click.option("--layers", type=int, help="Keep the first layers only.")
@_output
@_verify
def get_model(name: str, layers: int | None, output: Path | None, verify: bool) -> None:
    """Download the model NAME and convert it.

    There are smollm2-135m (93 MB, Apache-2.0) and gemma3-270m (239 MB, Gemma terms of use).
    """
    if name in _MADE:
        raise CommandError(f"{name} is made, not downloaded: opal models make {name}")
    if name not in DOWNLOADS:
        there = " and ".join(DOWNLOADS)
        raise CommandError(f"There is no model {name!r} to get; there are {there}.")
    with plain_failures():
        directory = ensure_download(name, layers, output, verify=verify, reporter=ConsoleReporter())
    click.echo(directory)


@models.command("make", short_help="Make a model with random weights.")
@click.argument("name", metavar="KIND")
@click.option("--seed", default=TinyLlama.seed, show_default=True, help="Decides the weights.")
@click.option("--layers", type=int, help=f"Of {TINY_LLAMA}. [default: {TinyLlama.layers}]")
@click.option("--heads", type=int, help=f"Query heads. [default: {TinyLlama.heads}]")
@click.option("--kv-heads", type=int, help=f"[default: {TinyLlama.kv_heads}]")
@click.option("--head-dim", type=int, help=f"[default: {TinyLlama.head_dim}]")
@_output
@_verify
def make_model(
    name: str, output: Path | None, verify: bool, seed: int, **shape: int | None
) -> None:
    """Make a model with random weights, without a network.

    KIND is tiny-llama, whose shape can be chosen, or one of those that `opal models list` names.
    """
    if name in DOWNLOADS:
        raise CommandError(f"{name} is downloaded, not made: opal models get {name}")
    if name not in _MADE:
        there = ", ".join(_MADE)
        raise CommandError(f"There is no model {name!r} to make; there are {there}.")
    chosen = {field: value for field, value in shape.items() if value is not None}
    if chosen and name != TINY_LLAMA:
        option = next(iter(chosen)).replace("_", "-")
        raise CommandError(f"--{option}: only {TINY_LLAMA} has a shape to choose, {name} has not.")
    reporter = ConsoleReporter()
    with plain_failures():
        if name == TINY_LLAMA:
            llama = TinyLlama(seed=seed, **chosen)
            directory = ensure_tiny_llama(llama, output, verify=verify, reporter=reporter)
        else:
            directory = ensure_tiny_hybrid(
                TINY_HYBRIDS[name], output, seed=seed, verify=verify, reporter=reporter
            )
    click.echo(directory)


@models.command("list", short_help="Show what there is and what is ready.")
@_verify
def list_models(verify: bool) -> None:
    """Show what there is, and which models in the user's cache are ready."""
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "state", "size", "command", box=None, pad_edge=False)
    directory = model_store.models_directory()
    with plain_failures():
        for path in sorted(directory.glob("[!.]*")):
            if path.is_dir():
                table.add_row(path.name, *_describe(path, verify=verify))
    for name in model_names():
        verb = "get" if name in DOWNLOADS else "make"
        if not (directory / name).is_dir():
            table.add_row(name, "absent", "", f"opal models {verb} {name}")
    click.echo(f"{directory}:")
    console = Console()
    if not console.is_terminal:
        console.width = 160  # nothing wraps what a script may read
    console.print(table)


def _describe(directory: Path, *, verify: bool) -> tuple[str, str]:
    """The state and the size of one model in the cache."""
    manifest = model_store.read_manifest(directory)
    fault = model_store.find_fault(directory, manifest, verify=verify)
    size_bytes = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    return f"damaged: {fault}" if fault else "ready", f"{size_bytes / 1e6:.1f} MB"
