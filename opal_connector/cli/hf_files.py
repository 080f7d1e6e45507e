"""The files of a Hugging Face model directory, as every model here writes them."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Array = npt.NDArray[np.float32]


def write_config(directory: Path, config: dict[str, Any], generation: dict[str, Any]) -> None:
    """Writes the model's shape, and what generation starts and stops with."""
    _write_json(directory / "config.json", config)
    write_generation(directory, generation)


def write_generation(directory: Path, generation: dict[str, Any]) -> None:
    """Writes what generation starts and stops with."""
    _write_json(directory / "generation_config.json", generation)


def write_weights(directory: Path, tensors: dict[str, Array]) -> None:
    """Writes the weights, readable to whoever may read the rest of the directory."""
    from safetensors.numpy import save_file

    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    # The library makes a private file, which no server under another user could load.
    shutil.copymode(directory / "config.json", path)


def write_tokenizer(
    directory: Path,
    tokenizer: "Tokenizer",
    *,
    roles: dict[str, str],
    chat_template: str,
    context_tokens: int,
) -> None:
    """Writes the three tokenizer files; `roles` names the token of each role, as `bos_token`.

    The class is the generic one on purpose: a model's own class would put back its own
    pre-tokenizer in place of the one in tokenizer.json.
    """
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": chat_template,
        **roles,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    _write_json(directory / "special_tokens_map.json", roles)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
