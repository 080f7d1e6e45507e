"""What a lookup can answer."""

from enum import Enum, auto

import msgspec


class LookupState(Enum):
    """What a lookup means for the caller."""

    MISS = auto()
    HIT = auto()
    WAIT = auto()  # ask again: somebody is bringing these very blocks


class LookupResult(msgspec.Struct, frozen=True, gc=False):
    """Blocks beyond the computed ones, and the tokens that each tier contributes."""

    state: LookupState
    block_count: int = 0
    tier_tokens: dict[str, int] = {}


MISS = LookupResult(LookupState.MISS)
WAIT = LookupResult(LookupState.WAIT)
