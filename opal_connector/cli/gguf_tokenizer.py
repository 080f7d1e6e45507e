"""The tokenizer inside a GGUF file, written as Hugging Face files.

Only byte-level BPE, whose tokens the GGUF stores in the same spelling as tokenizer.json.
"""

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.hf_files import write_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Metadata = dict[str, Any]


class TokenKind(IntEnum):
    """The token types of GGUF that matter here; all others are ordinary vocabulary."""

    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(
    tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]
) -> "Tokenizer":
    """A byte-level BPE that, as SmolLM2's, never joins two digits into one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marked = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in marked
            if kind == TokenKind.CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, kind in marked
            if kind == TokenKind.USER_DEFINED
        ]
    )
    return tokenizer


def convert_tokenizer(metadata: Metadata, directory: Path) -> None:
    """Writes the tokenizer that a GGUF's metadata describes."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CommandFailure(f"The tokenizer {kind[0]}/{kind[1]} cannot be converted.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    tokenizer = build_tokenizer(tokens, kinds, metadata["tokenizer.ggml.merges"])
    roles = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    write_tokenizer(
        directory,
        tokenizer,
        roles=roles,
        chat_template=metadata["tokenizer.chat_template"],
        context_tokens=metadata["llama.context_length"],
    )
