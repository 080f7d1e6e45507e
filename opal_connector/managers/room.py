"""How a tier makes room for one more object: what is free, then what leaves next."""

from collections.abc import Callable, Sequence

from opal_connector.managers.departures import Departures
from opal_connector.managers.records import ObjectGroup, ObjectRecord, ObjectSpec
from opal_connector.managers.tier_pool import Space
from opal_connector.managers.watermarks import Watermarks


class Room:
    """Takes room for new objects. Holds no state of its own: space and order belong to the tier.

    `evict` takes objects that have left the order out of the tier.
    """

    def __init__(
        self,
        space: Space,
        levels: Watermarks,
        order: Departures,
        groups: Sequence[ObjectGroup],
        evict: Callable[[Sequence[ObjectRecord]], object],
    ) -> None:
        self._space = space
        self._levels = levels
        self._order = order
        self._groups = tuple(groups)
        self._evict = evict

    def size_bytes(self, spec: ObjectSpec) -> int:
        """What an object takes."""
        return self._space.size_bytes(spec.block_count, self._groups[spec.group].members)

    def make(self, spec: ObjectSpec) -> tuple[int, ...] | None:
        """Rows for a new object, by evicting no more than is missing; None evicts nothing.

        An owner at his quota pays with what is his. Where eviction runs ahead, it must not happen
        here: what is dropped now could have been demoted. What is passing takes room only from
        what nobody wants.
        """
        size_bytes, owner, is_passing = self.size_bytes(spec), spec.owner, spec.is_passing
        missing_bytes = self._space.used_bytes + size_bytes - self._levels.limit_bytes
        if is_passing and self._levels.evicts_ahead and missing_bytes > 0:
            return None
        own = self._order.evict(
            self._order.shortfall_bytes(owner, size_bytes), owner=owner, only_unwanted=is_passing
        )
        if own is None:
            return None
        if self._levels.evicts_ahead:
            self._evict(own)
            if missing_bytes > 0 and not self._space.is_shared:  # there, what was granted counts
                self._levels.want(size_bytes)
                return None
            return self._allocate(spec)
        victims = self._order.evict(
            missing_bytes - sum(record.size_bytes for record in own),
            only_unwanted=is_passing,
            before=own,
        )
        if victims is None:
            return None
        self._evict([*own, *victims])
        return self._allocate(spec)

    def _allocate(self, spec: ObjectSpec) -> tuple[int, ...] | None:
        return self._space.allocate(spec.block_count, self._groups[spec.group].members)
