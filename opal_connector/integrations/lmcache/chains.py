"""The order of chunks in their sequences, which LMCache's keys do not tell and its lookups do."""

from collections.abc import Iterable, Sequence
from typing import Final

from lmcache.v1.distributed.api import ObjectKey

_MOST_KEYS: Final = 1 << 16

Chain = tuple[ObjectKey, ...]


class ChainMemory:
    """For recent keys the sequence that a lookup named them in, head first.

    A lookup comes before what is computed is stored, in several pieces perhaps. With its order the
    head of a sequence can be kept as fresh as its tail: it is worth nothing without the head.

    Mutable state: `_chains`; guarded by the lock of `ObjectBooks`. What was named longest ago is
    forgotten.
    """

    def __init__(self) -> None:
        self._chains: dict[ObjectKey, Chain] = {}

    def remember(self, keys: Sequence[ObjectKey]) -> Chain:
        """Take note of a lookup's keys; returns them head first, all parts of a chunk together."""
        positions: dict[tuple[str, int, int, str], int] = {}
        placed: list[tuple[int, ObjectKey]] = []
        for key in keys:
            row = key.model_name, key.kv_rank, key.object_group_id, key.cache_salt
            position = positions[row] = positions.get(row, -1) + 1
            placed.append((position, key))
        placed.sort(key=lambda pair: pair[0])
        chain = tuple(key for _, key in placed)
        for key in chain:
            self._chains.pop(key, None)
            self._chains[key] = chain
        while len(self._chains) > _MOST_KEYS:
            del self._chains[next(iter(self._chains))]
        return chain

    def around(self, keys: Iterable[ObjectKey]) -> list[Chain]:
        """The sequences that these keys are known to be of; a key without one is its own."""
        chains = (self._chains.get(key, (key,)) for key in keys)
        return list({id(chain): chain for chain in chains}.values())
