"""When a tier is too full, and how much it then gives up."""

import msgspec

from opal_connector.managers.leaving import LeavingObjects
from opal_connector.managers.tier_pool import Space

_ALMOST = 0.98  # of where eviction stops: from here on a newcomer costs something its place


class TierLimits(msgspec.Struct, frozen=True):
    """When things leave a tier.

    Eviction starts at `threshold` of the capacity; where it runs ahead of the stores it stops at
    `target`. What was not used for `ttl_seconds` leaves anyway. `quotas` are the tenants' shares.
    """

    threshold: float = 1.0
    target: float | None = None
    evicts_ahead: bool = False
    ttl_seconds: float | None = None
    quotas: dict[str, float] = {}


class Watermarks:
    """The levels of one tier: where eviction starts, and where it stops if it runs ahead.

    Where room is made at once, when a store needs it, eviction starts at the threshold and that is
    the limit. Where it takes a while (files, demotions), it runs ahead of the stores.

    Mutable state: `_wanted_bytes`, refused since the last look; guarded by the owner of the books.
    """

    def __init__(self, space: Space, leaving: LeavingObjects, limits: TierLimits) -> None:
        self._space = space
        self._leaving = leaving
        self._threshold = limits.threshold
        self._target = 0.95 * limits.threshold if limits.target is None else limits.target
        self.evicts_ahead = limits.evicts_ahead or space.frees_later
        self._wanted_bytes = 0

    @property
    def limit_bytes(self) -> int:
        """What a store may fill the tier to."""
        share = 1.0 if self.evicts_ahead else self._threshold
        return int(self._space.capacity_bytes * share)

    @property
    def is_crowded(self) -> bool:
        """Whether what comes in now costs what is there its place."""
        if self._space.is_shared:
            return self._space.is_crowded
        # Eviction in the background leaves room for a while: the tier is no less full for that.
        level = min(self._target, self._threshold) if self.evicts_ahead else self._threshold
        return self._space.used_bytes >= _ALMOST * level * self._space.capacity_bytes

    def want(self, size_bytes: int) -> None:
        """A store was refused for want of so much room."""
        self._wanted_bytes += size_bytes
        self._leaving.retry()

    @property
    def is_due(self) -> bool:
        """Whether to look at `take_excess_bytes`."""
        return self._wanted_bytes > 0 or self.excess_bytes > 0

    def take_excess_bytes(self) -> int:
        """Bytes to give up now; what was wanted until now is forgotten."""
        excess_bytes = self.excess_bytes
        self._wanted_bytes = 0
        return excess_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes to give up, so that there is room again; 0 below the threshold."""
        if not self.evicts_ahead or self._space.is_shared:
            return 0  # in a shared tier whoever keeps the limit evicts
        capacity_bytes = self._space.capacity_bytes
        staying_bytes = self._space.used_bytes - self._leaving.size_bytes + self._wanted_bytes
        if staying_bytes <= self._threshold * capacity_bytes:
            return 0
        return int(staying_bytes - self._target * capacity_bytes)
