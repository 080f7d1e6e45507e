"""The policies that look at one thing: the turn, chance, the load, or the prefix."""

import random
from collections.abc import Sequence

from opal_connector.cluster.policies.base import Candidate, Choice


class RoundRobin:
    """Every worker in turn, in the order of their ids, whoever comes and goes.

    Mutable state: the worker that was chosen last.
    """

    def __init__(self) -> None:
        self._last = ""

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002
        """The next one."""
        names = sorted(candidate.worker_id for candidate in candidates)
        self._last = next((name for name in names if name > self._last), names[0])
        return Choice(self._last)


class Random:
    """Any worker. Mutable state: the generator."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002
        """One of them."""
        return Choice(self._random.choice(candidates).worker_id)


class LeastLoaded:
    """The worker with the fewest requests under way; among equals any.

    Mutable state: the generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002
        """The one with the least to do."""
        fewest = min(candidate.load.requests for candidate in candidates)
        free = [found for found in candidates if found.load.requests == fewest]
        return Choice(self._random.choice(free).worker_id)


class MaxPrefix:
    """The worker that has most of the prompt; among equals, and where nobody has any, a random one.

    As published for Opal, it is blind to load. Mutable state: the generator.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:  # noqa: ARG002
        """The one with the longest match."""
        longest = max(candidate.match.total_tokens for candidate in candidates)
        best = [found for found in candidates if found.match.total_tokens == longest]
        return Choice(self._random.choice(best).worker_id)
