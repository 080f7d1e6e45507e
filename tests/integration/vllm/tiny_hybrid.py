"""A Gemma 3 of toy size with random weights: some layers see a window, some see everything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN = 64
HEADS = 2
HEAD_DIM = 32
MLP = 128
VOCABULARY = 512
WINDOW_TOKENS = 64


def make_tiny_gemma(directory: Path, layer_types: list[str]) -> Path:
    """Write the model; `layer_types` are `sliding_attention` or `full_attention`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(layer_types)))
    save_file(_weights(len(layer_types)), directory / "model.safetensors", {"format": "pt"})
    return directory


def _config(layer_types: list[str]) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "sliding_window": WINDOW_TOKENS,
        "layer_types": layer_types,
        "query_pre_attn_scalar": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def _weights(layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)).astype(np.float32) / np.float32(columns**0.5)

    def norm(size: int) -> np.ndarray:
        return (rng.standard_normal(size) * 0.1).astype(np.float32)

    weights = {
        # Gemma scales it up again; as large as the rest it would make every token repeat itself.
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN) / np.float32(HIDDEN**0.5),
        "model.norm.weight": norm(HIDDEN),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{prefix}self_attn.k_norm.weight": norm(HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}mlp.down_proj.weight": matrix(HIDDEN, MLP),
            f"{prefix}input_layernorm.weight": norm(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": norm(HIDDEN),
            f"{prefix}pre_feedforward_layernorm.weight": norm(HIDDEN),
            f"{prefix}post_feedforward_layernorm.weight": norm(HIDDEN),
        }
    return weights
