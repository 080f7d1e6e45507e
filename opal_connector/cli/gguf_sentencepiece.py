"""SentencePiece's byte-pair tokenizer as a GGUF stores it: pieces with scores, and no merges.

SentencePiece joins whichever neighbours make the piece with the highest score; the same is said
here as a list of merges, which is what tokenizer.json has.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE: Final = "▁"  # how pieces spell a space


class PieceKind(IntEnum):
    """The token types of GGUF that matter to SentencePiece."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


def build_sentencepiece(
    tokens: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    *,
    unknown_token: str,
    first_token: str | None,
) -> "Tokenizer":
    """A tokenizer that begins every text with `first_token`; what no piece spells is bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from tokenizers.processors import TemplateProcessing

    # A GGUF spells the spaces of what the user defined as spaces.
    tokens = [token.replace(" ", _SPACE) for token in tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    marked = list(zip(tokens, kinds, strict=True))
    ordinary = {token for token, kind in marked if kind == PieceKind.NORMAL}
    ranks = {token: -scores[vocabulary[token]] for token in ordinary}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of(ranks),
            unk_token=unknown_token,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in marked
            if kind == PieceKind.CONTROL
        ]
    )
    # SentencePiece finds these before it joins anything, in the text with its spaces replaced.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=True)
            for token, kind in marked
            if kind == PieceKind.USER_DEFINED
        ]
    )
    if first_token is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=[first_token, "$A"],
            pair=[first_token, "$A", first_token, "$B:1"],
            special_tokens=[(first_token, vocabulary[first_token])],
        )
    return tokenizer


def merges_of(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, those of the best (lowest) rank first."""
    found = [
        (rank, index, piece)
        for piece, rank in ranks.items()
        for index in range(1, len(piece))
        if piece[:index] in ranks and piece[index:] in ranks
    ]
    found.sort()
    return [(piece[:index], piece[index:]) for _, index, piece in found]
