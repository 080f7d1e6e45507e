"""The model architectures that a GGUF is converted from: names, configuration, order of weights.

An architecture says what its tensors are called in Hugging Face, what a GGUF writer changed in
them, and what its configuration is; all numbers are the GGUF's own, except where llama.cpp has
them in its code and not in the file.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
from typing_extensions import override

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_tokenizer import Metadata
from opal_connector.cli.hf_files import Array

_LAYER_TENSOR: Final = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")
_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTION_NAMES: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class Architecture(ABC):
    """One architecture of a GGUF file and its counterpart in Hugging Face."""

    name: ClassVar[str]
    title: ClassVar[str]
    layer_names: ClassVar[Mapping[str, str]]

    def tensor_name(self, name: str, *, layers: int) -> str | None:
        """The Hugging Face name of a GGUF tensor; None for a layer that is cut off."""
        if name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[name]
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or match["part"] not in self.layer_names:
            raise CommandFailure(f"The GGUF tensor {name} has no place in a {self.title} model.")
        layer = int(match["layer"])
        part = self.layer_names[match["part"]]
        return f"model.layers.{layer}.{part}" if layer < layers else None

    @abstractmethod
    def restore(self, name: str, values: Array, metadata: Metadata) -> Array:
        """Undoes what the GGUF writer did to the tensor of this GGUF name."""

    @abstractmethod
    def config(self, metadata: Metadata, *, layers: int, is_tied: bool) -> dict[str, Any]:
        """The model configuration."""

    @abstractmethod
    def generation_config(self, metadata: Metadata) -> dict[str, Any]:
        """What generation starts and stops with."""


class Llama(Architecture):
    """Llama and its kin: only the rows of query and key projections lie in another order."""

    name = "llama"
    title = "Llama"
    layer_names: ClassVar[Mapping[str, str]] = {
        **_PROJECTION_NAMES,
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }

    @override
    def restore(self, name: str, values: Array, metadata: Metadata) -> Array:
        if name.endswith(".attn_q.weight"):
            return unpermute_rows(values, metadata["llama.attention.head_count"])
        if name.endswith(".attn_k.weight"):
            return unpermute_rows(values, metadata["llama.attention.head_count_kv"])
        return values

    @override
    def config(self, metadata: Metadata, *, layers: int, is_tied: bool) -> dict[str, Any]:
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
            "rms_norm_eps": shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": is_tied,
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        }

    @override
    def generation_config(self, metadata: Metadata) -> dict[str, Any]:
        """Stops at the end of a chat message, and at the end of a plain text."""
        end_of_message: int = metadata["tokenizer.ggml.eos_token_id"]
        end_of_text: int = metadata["tokenizer.ggml.unknown_token_id"]
        return {
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": [end_of_message, end_of_text],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        }


class Gemma3(Architecture):
    """Gemma 3: five layers that see a window, then one that sees everything, and so on.

    Its norms multiply by one more than their weight; the GGUF has that one added already.
    """

    name = "gemma3"
    title = "Gemma 3"
    layer_names: ClassVar[Mapping[str, str]] = {
        **_PROJECTION_NAMES,
        "attn_q_norm.weight": "self_attn.q_norm.weight",
        "attn_k_norm.weight": "self_attn.k_norm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
    }
    # These two are in llama.cpp's code for this architecture, not in the file.
    layers_per_full: ClassVar[int] = 6
    window_rope_theta: ClassVar[float] = 10_000.0
    end_of_turn: ClassVar[str] = "<end_of_turn>"

    @override
    def restore(self, name: str, values: Array, metadata: Metadata) -> Array:
        return values - np.float32(1) if name.endswith("norm.weight") else values

    @override
    def config(self, metadata: Metadata, *, layers: int, is_tied: bool) -> dict[str, Any]:
        theta: float = metadata["gemma3.rope.freq_base"]
        head_dim: int = metadata["gemma3.attention.key_length"]
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "dtype": "float32",
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "hidden_size": metadata["gemma3.embedding_length"],
            "intermediate_size": metadata["gemma3.feed_forward_length"],
            "num_hidden_layers": layers,
            "num_attention_heads": metadata["gemma3.attention.head_count"],
            "num_key_value_heads": metadata["gemma3.attention.head_count_kv"],
            "head_dim": head_dim,
            "query_pre_attn_scalar": head_dim,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": metadata["gemma3.context_length"],
            "rms_norm_eps": shortest(metadata["gemma3.attention.layer_norm_rms_epsilon"]),
            "layer_types": [self.layer_type(layer) for layer in range(layers)],
            "sliding_window": metadata["gemma3.attention.sliding_window"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": theta},
                "sliding_attention": {
                    "rope_type": "default",
                    "rope_theta": self.window_rope_theta,
                },
            },
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": is_tied,
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        }

    def layer_type(self, layer: int) -> str:
        """Every sixth layer sees everything."""
        is_full = (layer + 1) % self.layers_per_full == 0
        return "full_attention" if is_full else "sliding_attention"

    @override
    def generation_config(self, metadata: Metadata) -> dict[str, Any]:
        """Stops at the end of a text, and at the end of a turn of a chat."""
        end_of_turn = metadata["tokenizer.ggml.tokens"].index(self.end_of_turn)
        return {
            "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
            "eos_token_id": [metadata["tokenizer.ggml.eos_token_id"], end_of_turn],
            "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        }


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    architecture.name: architecture for architecture in (Llama(), Gemma3())
}


def unpermute_rows(weight: Array, head_count: int) -> Array:
    """Puts the rows of a query or key projection back in Hugging Face order.

    A rotary pair is rows (i, i + half) of a head in Hugging Face order, and (2i, 2i + 1) in GGUF.
    """
    rows, columns = weight.shape
    half = rows // head_count // 2
    return weight.reshape(head_count, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
