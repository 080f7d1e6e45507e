"""The prefixes that many requests have lately had in common. In memory only, and never logged."""

from array import array
from collections import Counter, deque
from typing import Final

import msgspec

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion

_MAX_PROMPTS: Final = 512
_MAX_TOKENS: Final = 2_000_000
_SHARED_BY: Final = 2  # requests at least


class _Prompt(msgspec.Struct, frozen=True):
    """A prompt, its tokens kept small, and the hashes of its blocks."""

    request: PrefixRequest  # without tokens
    token_ids: "array[int]"
    hashes: list[bytes]
    block_tokens: int


class HotPrefixes:
    """The last prompts, and what they share.

    Mutable state: the prompts, the oldest first, and the number of their tokens. The loop's thread
    alone uses it.
    """

    def __init__(self, max_prompts: int = _MAX_PROMPTS, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._prompts: deque[_Prompt] = deque()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def see(self, question: RouteQuestion, decision: RouteDecision) -> None:
        """A request is sent to where the decision says."""
        request = question.prefix
        hashed = max(decision.prefixes, key=lambda one: len(one.hashes), default=None)
        if request is None or hashed is None or not hashed.hashes:
            return
        if len(request.token_ids) > self._max_tokens:
            return
        try:
            token_ids = array("I", request.token_ids)
        except OverflowError:  # a number that no engine takes for a token
            return
        self._prompts.append(
            _Prompt(
                msgspec.structs.replace(request, token_ids=[]),
                token_ids,
                list(hashed.hashes),
                hashed.places.block_tokens,
            )
        )
        self._tokens += len(token_ids)
        while len(self._prompts) > self._max_prompts or self._tokens > self._max_tokens:
            self._tokens -= len(self._prompts.popleft().token_ids)

    def hottest(self, count: int) -> list[PrefixRequest]:
        """The prefixes that save most where they are there: how many have it, times its length.

        None is the beginning of another one.
        """
        shared_by = Counter(block for prompt in self._prompts for block in prompt.hashes)
        found: dict[bytes, tuple[int, int, _Prompt]] = {}
        for prompt in self._prompts:
            depth = _shared_depth(prompt.hashes, shared_by)
            if depth:
                last = prompt.hashes[depth - 1]
                saved = shared_by[last] * depth * prompt.block_tokens
                found[last] = (saved, depth, prompt)
        chosen: list[PrefixRequest] = []
        covered: set[bytes] = set()
        for saved, depth, prompt in sorted(found.values(), key=_by_saving):
            if len(chosen) >= count or not saved:
                break
            if prompt.hashes[depth - 1] in covered:
                continue
            covered.update(prompt.hashes[:depth])
            tokens = prompt.token_ids[: depth * prompt.block_tokens].tolist()
            chosen.append(msgspec.structs.replace(prompt.request, token_ids=tokens))
        return chosen


def _by_saving(one: tuple[int, int, _Prompt]) -> tuple[int, int]:
    saved, depth, _ = one
    return -saved, -depth


def _shared_depth(hashes: list[bytes], shared_by: Counter[bytes]) -> int:
    """The blocks from the start that others have, too: a block is only had with its parent."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if shared_by[hashes[middle]] >= _SHARED_BY:
            low = middle + 1
        else:
            high = middle
    return low
