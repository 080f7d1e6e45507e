"""Prompts from a seed, and small helpers to build requests of them."""

import random
from typing import Any

_FIRST_TOKEN = 1000  # past the control tokens of every model that the tests serve
_LAST_TOKEN = 40000


def random_tokens(count: int, seed: int) -> list[int]:
    """Tokens that say nothing. Another seed gives another first token already."""
    rng = random.Random(seed)
    return [rng.randint(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(count)]


def request(tokens: list[int], **more: Any) -> dict[str, Any]:
    """A request as the engine's child takes it. `sampling` and `salt` may be given."""
    return {"tokens": tokens, **more}


def greedy(max_tokens: int) -> dict[str, Any]:
    """Sampling for an answer of exactly that many tokens."""
    return {"max_tokens": max_tokens}
