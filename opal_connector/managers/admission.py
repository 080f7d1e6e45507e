"""Whether an object is worth a write to a tier that is full: most chunks are never asked for again.

While a tier has room, everything goes there. Once it is crowded, every newcomer costs something
its place, and what was seen only once mostly is not seen again. How true that is depends on the
workload and on the size of the tier, so it is measured: a sixteenth of the chunks, chosen by their
hash, is always taken at first sight, and the share of them that is used before it leaves says
whether first sight is enough for the others.
"""

from collections import OrderedDict
from collections.abc import Sequence

from opal_connector.managers.records import ObjectKey
from opal_connector.managers.storage_backend import OpalStorageBackend

_SIGHTS = 65536  # chunks whose first sight is remembered
_SAMPLE_MASK = 0x0F
_WORTH = 0.08  # share of first-sight chunks that must be used for all of them to be taken
_WEIGHT = 1 / 64  # of one departure in the running share
_HYSTERESIS = 1.25


class Admission:
    """Admission to one tier.

    Mutable state: `_sights` (chunks seen once, the oldest first), `_probes` (sampled chunks taken
    at first sight, and whether they were used), the running share and the present rule; guarded by
    the owner of the books.
    """

    def __init__(self, tier: OpalStorageBackend, *, is_adaptive: bool) -> None:
        self.is_adaptive = is_adaptive
        self.takes_first_sight = True
        self._tier = tier
        self._share = 2 * _WORTH
        self._sights: OrderedDict[ObjectKey, int] = OrderedDict()
        self._probes: dict[ObjectKey, bool] = {}
        if is_adaptive:
            tier.on_eviction = self._departed

    def admits(self, key: ObjectKey) -> bool:
        """Whether the tier takes this object now."""
        if not self.is_adaptive or not self._tier.levels.is_crowded:
            return True
        if self._sights.get(key, 0) > 1:
            return True
        is_sampled = key[0] & _SAMPLE_MASK == 0
        if is_sampled:
            self._probes[key] = False
        return is_sampled or self.takes_first_sight

    def count_sight(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Count a request over these chunks; returns those now seen for the second time."""
        again: list[ObjectKey] = []
        for key in keys:
            count = self._sights.pop(key, 0) + 1
            self._sights[key] = count
            if count == 2:
                again.append(key)
            if count > 1 and key in self._probes:
                self._probes[key] = True
        while len(self._sights) > _SIGHTS:
            self._sights.popitem(last=False)
        return again

    def _departed(self, key: ObjectKey) -> None:
        was_used = self._probes.pop(key, None)
        if was_used is None:
            return
        self._share += _WEIGHT * (was_used - self._share)
        if self._share < _WORTH:
            self.takes_first_sight = False
        elif self._share > _WORTH * _HYSTERESIS:
            self.takes_first_sight = True
