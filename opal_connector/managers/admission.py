"""Whether an object is worth a write to a tier that is full: most chunks are never asked for again.

While a tier has room, everything goes there. Once it is crowded, every newcomer costs something
its place, and what was seen only once mostly is not seen again. Taking chunks at second sight then
saves most of the writes. What it costs depends on the workload and on the size of the tier, so it
is tried out: two small images of the tier, over a sample of the chunks, follow one rule each, and
the hits that the second one lacks say which rule the tier follows.
"""

from collections import OrderedDict
from collections.abc import Sequence

from opal_connector.managers.records import ObjectKey
from opal_connector.managers.storage_backend import OpalStorageBackend

_SIGHTS = 65536  # chunks whose sights are remembered
_IMAGE_MOST = 2048  # chunks in an image; beyond it the sample is halved
_MASK_MOST = 0xFF
_LOSS_ALLOWED = 0.008  # of all accesses: more lost hits than that add to the regret
# Lost hits beyond what is allowed, in chunks that the tier holds. The change itself costs some,
# until what came in at first sight has left; a rule that costs hits for good costs more and more.
_REGRET_LITTLE = 0.05
_REGRET_MUCH = 0.25
_REGRET_MOST = 0.40  # no more is remembered, so that another workload is noticed
_WINDOW = 4  # accesses that the share of writes reaches back, in chunks that the tier holds
_WRITES_WORTH = 0.8  # of the writes at first sight: more saves too little to lose anything for it


class _Image:
    """The chunks that a tier of so many would hold, by order of use.

    Mutable state: the chunks, how many had to go, and the running share of accesses that wrote.
    """

    def __init__(self) -> None:
        self.keys: OrderedDict[ObjectKey, None] = OrderedDict()
        self.departed = 0
        self.writes = 0.0

    def use(self, key: ObjectKey, *, takes: bool, most: int) -> bool:
        """One access to a chunk that may come in if `takes`; returns whether it was here."""
        is_here = key in self.keys
        if is_here:
            self.keys.move_to_end(key)
        elif takes:
            self.keys[key] = None
            while len(self.keys) > most:
                self.keys.popitem(last=False)
                self.departed += 1
        self.writes += ((takes and not is_here) - self.writes) / (_WINDOW * most)
        return is_here


class Admission:
    """Admission to one tier.

    Mutable state: `_sights` (how often chunks were seen, the oldest sight first), the images (of
    the faster tiers, of this one at first sight, and at second), the mask of the sample, the
    regret, and the present rule; guarded by the owner of the books.
    """

    def __init__(
        self,
        tier: OpalStorageBackend,
        *,
        is_adaptive: bool,
        faster: Sequence[OpalStorageBackend] = (),
    ) -> None:
        self.is_adaptive = is_adaptive
        self.takes_first_sight = True
        self._tier = tier
        self._faster = tuple(faster)
        self._sights: OrderedDict[ObjectKey, int] = OrderedDict()
        self._mask = 0
        self._near = _Image()
        self._first = _Image()
        self._second = _Image()
        self._regret = 0.0

    def admits(self, key: ObjectKey) -> bool:
        """Whether the tier takes this object now."""
        if not self.is_adaptive or not self._tier.levels.is_crowded:
            return True
        return self.takes_first_sight or self._sights.get(key, 0) > 1

    def count_sight(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Count a request over these chunks; returns those now seen for the second time."""
        again: list[ObjectKey] = []
        sampled: list[tuple[ObjectKey, int]] = []
        for key in keys:
            count = self._sights.pop(key, 0) + 1
            self._sights[key] = count
            if count == 2:
                again.append(key)
            if not key[0] & self._mask:
                sampled.append((key, count))
        while len(self._sights) > _SIGHTS:
            self._sights.popitem(last=False)
        if sampled:
            self._try_out(sampled)
        return again

    def _try_out(self, sampled: Sequence[tuple[ObjectKey, int]]) -> None:
        """Let the images see the sampled chunks of a request, the tail first, and judge."""
        is_crowded = self._tier.levels.is_crowded
        share = self._mask + 1
        most = max(1, len(self._tier) // share) if is_crowded else _IMAGE_MOST + 1
        near_most = sum(len(tier) for tier in self._faster) // share
        for key, count in reversed(sampled):
            is_near = near_most > 0 and self._near.use(key, takes=True, most=near_most)
            was_first = self._first.use(key, takes=True, most=most)
            was_second = self._second.use(key, takes=count > 1 or not is_crowded, most=most)
            if is_crowded:
                lost = 0 if is_near else was_first - was_second
                regret = self._regret + lost - _LOSS_ALLOWED
                self._regret = min(max(0.0, regret), _REGRET_MOST * most)
        if len(self._first.keys) > _IMAGE_MOST and self._mask < _MASK_MOST:
            self._halve_sample()
        elif is_crowded:
            self._judge(most)

    def _judge(self, most: int) -> None:
        if self._first.departed < most:
            return  # the images have not had the time to differ
        is_worth_it = self._second.writes < _WRITES_WORTH * self._first.writes
        if not is_worth_it or self._regret > _REGRET_MUCH * most:
            self.takes_first_sight = True
        elif self._regret < _REGRET_LITTLE * most:
            self.takes_first_sight = False

    def _halve_sample(self) -> None:
        self._mask = 2 * self._mask + 1
        self._regret /= 2
        for image in (self._near, self._first, self._second):
            for key in [key for key in image.keys if key[0] & self._mask]:
                del image.keys[key]
