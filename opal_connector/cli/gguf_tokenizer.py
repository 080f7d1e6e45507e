"""The tokenizer inside a GGUF file, written as Hugging Face files.

Two kinds: byte-level BPE, whose tokens the GGUF stores in the spelling of tokenizer.json, and
SentencePiece.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.gguf_sentencepiece import build_sentencepiece
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
    if kind not in _BUILDERS:
        raise CommandFailure(f"The tokenizer {kind[0]}/{kind[1]} cannot be converted.")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    roles = {
        f"{role}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    write_tokenizer(
        directory,
        _BUILDERS[kind](metadata, roles),
        roles=roles,
        chat_template=metadata.get("tokenizer.chat_template", _TURNS_TEMPLATE),
        context_tokens=metadata[f"{metadata['general.architecture']}.context_length"],
    )


def _byte_level(metadata: Metadata, roles: dict[str, str]) -> "Tokenizer":
    del roles
    return build_tokenizer(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.token_type"],
        metadata["tokenizer.ggml.merges"],
    )


def _sentencepiece(metadata: Metadata, roles: dict[str, str]) -> "Tokenizer":
    if metadata["tokenizer.ggml.add_space_prefix"]:
        raise CommandFailure("A tokenizer that puts a space before a text cannot be converted.")
    begins = metadata["tokenizer.ggml.add_bos_token"]
    return build_sentencepiece(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.token_type"],
        metadata["tokenizer.ggml.scores"],
        unknown_token=roles["unk_token"],
        first_token=roles["bos_token"] if begins else None,
    )


_BUILDERS: Final[Mapping[tuple[str, str], Callable[[Metadata, dict[str, str]], "Tokenizer"]]] = {
    ("gpt2", "smollm"): _byte_level,
    ("llama", "default"): _sentencepiece,
}
# Gemma's turns, for a model whose file has no template of its own; a system message is the
# beginning of what the user says first.
_TURNS_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% set told = namespace(text='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}"
    "{% set told.text = message['content'] | trim + '\n\n' %}"
    "{% else %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + told.text + message['content'] | trim"
    " + '<end_of_turn>\n' }}"
    "{% set told.text = '' %}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
