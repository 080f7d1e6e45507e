"""A Llama with random weights and a tokenizer of single bytes: made in a moment, from nothing.

It speaks nonsense, but deterministic nonsense in which every character depends on all before it:
what a test needs that compares answers with and without a cache.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opal_connector.cli.errors import CommandError
from opal_connector.cli.gguf_tokenizer import TokenKind, build_tokenizer
from opal_connector.cli.hf_files import Array, write_config, write_tokenizer, write_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Raised whenever the same parameters give another model.
REVISION: Final = 1
CONTEXT_TOKENS: Final = 8192
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTE_COUNT: Final = 256
_END_OF_TEXT, _MESSAGE_START, _MESSAGE_END = range(_BYTE_COUNT, _BYTE_COUNT + len(SPECIAL_TOKENS))
VOCABULARY: Final = _BYTE_COUNT + len(SPECIAL_TOKENS)
TOKEN_ROLES: Final = {
    "bos_token_id": _MESSAGE_START,
    "eos_token_id": _MESSAGE_END,
    "pad_token_id": _MESSAGE_END,
}
GENERATION: Final = {"bos_token_id": _MESSAGE_START, "eos_token_id": [_MESSAGE_END, _END_OF_TEXT]}
PRINTABLE: Final = slice(ord(" "), ord("~") + 1)
_ROPE_THETA: Final = 10000.0
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyLlama:
    """The shape of a tiny model; the hidden size follows as `heads * head_dim`."""

    seed: int = 0
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.kv_heads, self.head_dim) < 1 or self.seed < 0:
            raise CommandError("Layers, heads and head size start at 1, and the seed at 0.")
        if self.heads % self.kv_heads:
            raise CommandError(
                f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly; "
                "the first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise CommandError(f"The head size must be even, not {self.head_dim}.")

    @property
    def name(self) -> str:
        """`tiny-llama`, followed by what differs from the defaults."""
        differing = [
            f"{field.name.replace('_', '')}{getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return "-".join(["tiny-llama", *differing])

    @property
    def hidden(self) -> int:
        """The width of the residual stream."""
        return self.heads * self.head_dim

    def build(self, directory: Path) -> None:
        """Writes the model as a Hugging Face directory."""
        write_config(directory, self._config(), GENERATION)
        write_byte_tokenizer(directory)
        write_weights(directory, self._tensors())

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
            "rope_theta": _ROPE_THETA,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            **TOKEN_ROLES,
        }

    def _tensors(self) -> dict[str, Array]:
        """Random weights, scaled so that signals keep their size through every layer."""
        random = np.random.default_rng(self.seed)
        hidden, kv_rows, inner = self.hidden, self.kv_heads * self.head_dim, 2 * self.hidden

        def matrix(rows: int, columns: int, scale: float = 1.0) -> Array:
            values = random.standard_normal((rows, columns), dtype=np.float32)
            return values * np.float32(scale / columns**0.5)

        ones = np.ones(hidden, dtype=np.float32)
        tensors = {
            "model.embed_tokens.weight": matrix(VOCABULARY, hidden),
            "model.norm.weight": ones,
        }
        for layer in range(self.layers):
            parts = {
                "input_layernorm": ones,
                # Sharper than natural: attention must prefer some positions to others.
                "self_attn.q_proj": matrix(hidden, hidden, scale=2.0),
                "self_attn.k_proj": matrix(kv_rows, hidden, scale=2.0),
                "self_attn.v_proj": matrix(kv_rows, hidden),
                "self_attn.o_proj": matrix(hidden, hidden, scale=2.0),
                "post_attention_layernorm": ones,
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }
            for part, values in parts.items():
                tensors[f"model.layers.{layer}.{part}.weight"] = values
        # Only printable characters have a row, so greedy text is always readable and never ends.
        head = np.zeros((VOCABULARY, hidden), dtype=np.float32)
        head[PRINTABLE] = matrix(PRINTABLE.stop - PRINTABLE.start, hidden)
        tensors["lm_head.weight"] = head
        return tensors


def write_byte_tokenizer(directory: Path) -> None:
    """Writes the tokenizer of single bytes with its chat template."""
    roles = {
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[2],
        "unk_token": SPECIAL_TOKENS[0],
    }
    write_tokenizer(
        directory,
        byte_tokenizer(),
        roles=roles,
        chat_template=_CHAT_TEMPLATE,
        context_tokens=CONTEXT_TOKENS,
    )


def byte_tokenizer() -> "Tokenizer":
    """A tokenizer whose token ids are the bytes of the text, and then the special tokens."""
    tokens = [*_byte_spellings(), *SPECIAL_TOKENS]
    kinds = [0] * _BYTE_COUNT + [int(TokenKind.CONTROL)] * len(SPECIAL_TOKENS)
    return build_tokenizer(tokens, kinds, merges=[])


def _byte_spellings() -> list[str]:
    """How byte-level BPE spells each byte: itself where visible, else from code point 256 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(256 + index) for index in range(_BYTE_COUNT))
    return [chr(byte) if byte in visible else next(hidden) for byte in range(_BYTE_COUNT)]
