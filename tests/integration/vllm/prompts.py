"""Prompts from a seed, and small helpers to build requests of them."""

import random
from typing import Any

_FIRST_TOKEN = 1000  # past the control tokens
_LAST_TOKEN = 40000


def random_tokens(count: int, seed: int, last: int = _LAST_TOKEN) -> list[int]:
    """Tokens up to `last` that say nothing. Another seed gives other tokens from the start."""
    rng = random.Random(seed)
    return [rng.randint(min(_FIRST_TOKEN, last // 2), last) for _ in range(count)]


def request(tokens: list[int], **more: Any) -> dict[str, Any]:
    """A request as the engine's child takes it. `sampling` and `salt` may be given."""
    return {"tokens": tokens, **more}


def greedy(max_tokens: int) -> dict[str, Any]:
    """Sampling for an answer of exactly that many tokens."""
    return {"max_tokens": max_tokens}
