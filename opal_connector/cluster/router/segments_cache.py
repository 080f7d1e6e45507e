"""Tokenizing what changes only: texts that share most of their turns share most of their tokens."""

import re
from collections import OrderedDict
from typing import Any, Final

_CACHE_CHARACTERS: Final = 32 << 20
_PROBE: Final = "Once,  upon\na time\t1234 ünïcode ✓ x"


class SegmentedTokenizer:
    """A tokenizer that remembers what lies between two special tokens.

    A special token parts a text before anything else is done to it, so what lies between two of
    them is tokenized alone, and once: of the next turn of a conversation only the turn. Tokenizers
    of which that is not true (found by trying when it is made) are asked for whole texts.
    Mutable state: the cache, by characters, the least recently used first; used by one thread at a
    time.

    Args:
        tokenizer: A tokenizer of `transformers`.
    """

    def __init__(self, tokenizer: Any, *, cache_characters: int = _CACHE_CHARACTERS) -> None:
        self._tokenizer = tokenizer
        self._cache_characters = cache_characters
        self._cached: OrderedDict[str, list[int]] = OrderedDict()
        self._cached_characters = 0
        self._ids: dict[str, int] = {
            token.content: number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and not (token.lstrip or token.rstrip or token.single_word)
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._splitter = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._begin, self._end = self._around()
        self.is_segmented = bool(self._ids) and self._is_exact()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        if not self.is_segmented:
            return self._whole(text, add_special_tokens=add_special_tokens)
        ids = self._segments(text)
        return [*self._begin, *ids, *self._end] if add_special_tokens else ids

    def costs_characters(self, text: str) -> int:
        """How much of a text is not remembered, and will have to be tokenized."""
        if not self.is_segmented:
            return len(text)
        parts = self._splitter.split(text)
        return sum(
            len(part) for part in parts if part not in self._cached and part not in self._ids
        )

    def _segments(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._splitter.split(text):
            number = self._ids.get(part)
            if number is not None:
                ids.append(number)
            elif part:
                ids += self._segment(part)
        return ids

    def _segment(self, text: str) -> list[int]:
        ids = self._cached.get(text)
        if ids is not None:
            self._cached.move_to_end(text)
            return ids
        ids = self._whole(text, add_special_tokens=False)
        if len(text) <= self._cache_characters:
            self._cached[text] = ids
            self._cached_characters += len(text)
            while self._cached_characters > self._cache_characters:
                oldest, _ = self._cached.popitem(last=False)
                self._cached_characters -= len(oldest)
        return ids

    def _whole(self, text: str, *, add_special_tokens: bool) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens).input_ids
        return found

    def _around(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind every text."""
        plain = self._whole("a", add_special_tokens=False)
        framed = self._whole("a", add_special_tokens=True)
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
        return [], []

    def _is_exact(self) -> bool:
        """Whether texts tokenized in parts give what whole texts give."""
        some = list(self._ids)[:8]
        texts = [_PROBE, f" {_PROBE} "]
        texts += [f"{_PROBE}{token}{_PROBE}\n{token} {_PROBE}" for token in some]
        texts += ["".join(f"{token}{_PROBE}" for token in some)]
        self.is_segmented = True
        is_exact = all(
            self.encode(text, add_special_tokens=framed)
            == self._whole(text, add_special_tokens=framed)
            for text in texts
            for framed in (False, True)
        )
        self._cached.clear()
        self._cached_characters = 0
        return is_exact
