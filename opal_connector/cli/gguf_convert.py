"""A llama-architecture GGUF file, written as a Hugging Face directory in float32.

Three things differ between the two forms: names, quantisation, and the order of the rows of the
query and key projections.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_tokenizer import Metadata, convert_tokenizer
from opal_connector.cli.hf_files import Array, write_config, write_weights
from opal_connector.cli.progress import Reporter

if TYPE_CHECKING:
    from gguf import GGUFReader

_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")


def convert_gguf(path: Path, directory: Path, *, layers: int | None, reporter: Reporter) -> None:
    """Writes configuration, weights and tokenizer of the first `layers` layers (None: of all)."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    metadata = read_metadata(reader)
    if metadata["general.architecture"] != "llama":
        raise CommandFailure(f"The architecture {metadata['general.architecture']} is not llama.")
    layers = metadata["llama.block_count"] if layers is None else layers
    tensors = read_tensors(reader, metadata, layers=layers, reporter=reporter)
    is_tied = "lm_head.weight" not in tensors
    config = llama_config(metadata, layers=layers, is_tied=is_tied)
    write_config(directory, config, generation_config(metadata))
    convert_tokenizer(metadata, directory)
    write_weights(directory, tensors)


def read_metadata(reader: "GGUFReader") -> Metadata:
    """Every key of the file with its value in plain Python."""
    return {name: entry.contents() for name, entry in reader.fields.items()}


def read_tensors(
    reader: "GGUFReader", metadata: Metadata, *, layers: int, reporter: Reporter
) -> dict[str, Array]:
    """The tensors of the first layers, in float32 and under their Hugging Face names."""
    from gguf import dequantize

    permuted = {
        ".attn_q.weight": metadata["llama.attention.head_count"],
        ".attn_k.weight": metadata["llama.attention.head_count_kv"],
    }
    tensors: dict[str, Array] = {}
    with reporter.step(f"converting {layers} layers to float32", len(reader.tensors)) as advance:
        for tensor in reader.tensors:
            advance(1)
            name = tensor_name(tensor.name, layers=layers)
            if name is None:
                continue
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            for suffix, head_count in permuted.items():
                if tensor.name.endswith(suffix):
                    values = unpermute_rows(values, head_count)
            tensors[name] = np.ascontiguousarray(values)
    return tensors


def tensor_name(name: str, *, layers: int) -> str | None:
    """The Hugging Face name of a GGUF tensor; None for a layer that is cut off."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match["part"] not in _LAYER_NAMES:
        raise CommandFailure(f"The GGUF tensor {name} has no place in a Llama model.")
    layer = int(match["layer"])
    return f"model.layers.{layer}.{_LAYER_NAMES[match['part']]}" if layer < layers else None


def unpermute_rows(weight: Array, head_count: int) -> Array:
    """Puts the rows of a query or key projection back in Hugging Face order.

    A rotary pair is rows (i, i + half) of a head in Hugging Face order, and (2i, 2i + 1) in GGUF.
    """
    rows, columns = weight.shape
    half = rows // head_count // 2
    return weight.reshape(head_count, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def llama_config(metadata: Metadata, *, layers: int, is_tied: bool) -> dict[str, Any]:
    """The model configuration, all of it from the GGUF's metadata."""
    hidden: int = metadata["llama.embedding_length"]
    heads: int = metadata["llama.attention.head_count"]
    theta: float = metadata["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": is_tied,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """Where generation stops: the end of a chat message, and the end of a plain text."""
    end_of_message: int = metadata["tokenizer.ggml.eos_token_id"]
    end_of_text: int = metadata["tokenizer.ggml.unknown_token_id"]
    return {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [end_of_message, end_of_text],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
