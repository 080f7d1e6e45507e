"""A GGUF file, written as a Hugging Face directory in float32.

Three things differ between the two forms: names, quantisation, and what the GGUF's writer did to
some weights, which its architecture knows.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_architectures import ARCHITECTURES, Architecture
from opal_connector.cli.gguf_tokenizer import Metadata, convert_tokenizer
from opal_connector.cli.hf_files import Array, write_config, write_weights
from opal_connector.cli.progress import Reporter

if TYPE_CHECKING:
    from gguf import GGUFReader


def convert_gguf(path: Path, directory: Path, *, layers: int | None, reporter: Reporter) -> None:
    """Writes configuration, weights and tokenizer of the first `layers` layers (None: of all)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    metadata = read_metadata(reader)
    name: str = metadata["general.architecture"]
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise CommandFailure(f"The architecture {name} cannot be converted; there is {known}.")
    layers = metadata[f"{name}.block_count"] if layers is None else layers
    tensors = read_tensors(reader, architecture, metadata, layers=layers, reporter=reporter)
    is_tied = "lm_head.weight" not in tensors
    config = architecture.config(metadata, layers=layers, is_tied=is_tied)
    write_config(directory, config, architecture.generation_config(metadata))
    convert_tokenizer(metadata, directory)
    write_weights(directory, tensors)


def read_metadata(reader: "GGUFReader") -> Metadata:
    """Every key of the file with its value in plain Python."""
    return {name: entry.contents() for name, entry in reader.fields.items()}


def read_tensors(
    reader: "GGUFReader",
    architecture: Architecture,
    metadata: Metadata,
    *,
    layers: int,
    reporter: Reporter,
) -> dict[str, Array]:
    """The tensors of the first layers, in float32 and under their Hugging Face names."""
    from gguf import dequantize

    tensors: dict[str, Array] = {}
    with reporter.step(f"converting {layers} layers to float32", len(reader.tensors)) as advance:
        for tensor in reader.tensors:
            advance(1)
            name = architecture.tensor_name(tensor.name, layers=layers)
            if name is None:
                continue
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            restored = architecture.restore(tensor.name, values, metadata)
            tensors[name] = np.ascontiguousarray(restored)
    return tensors
