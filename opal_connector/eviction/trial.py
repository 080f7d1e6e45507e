"""Ghost caches in which candidates are compared on a sample of the accesses."""

import math
from collections.abc import Mapping, Sequence

from opal_connector.eviction.base import EvictionPolicy, Key
from opal_connector.eviction.sketch import key_hash

MOST_SHIFT = 4  # one key in sixteen
FEWEST_KEYS = 100  # a smaller tier samples more of its keys
LEAD = 2.0  # standard deviations that the first change takes
LEAD_STEP = 0.5  # that each further change takes more
MOST_LEAD = 4.0
MARGIN = 0.005  # of the hits
MEMORY = 16  # accesses per key of a ghost cache after which a comparison counts half


class Trial:
    """One ghost cache per candidate, over about one key in sixteen.

    A sample of the keys behaves like all of them in a tier that is smaller by the same factor
    ("Efficient MRC construction with SHARDS", Waldspurger, Park, Garthwaite and Ahmad, FAST 2015).
    Keys are sampled by their own value, so every ghost cache sees every access to them: a key of
    bytes is a digest, its first byte as good as a hash.

    A hit counts only where the prefix before it is hit too. What belongs to one request shows in
    the calls: a chain is touched from its tail to its head, then its missing part is inserted from
    head to tail; a touch after an insertion begins the next request.

    A candidate leads when its advantage over the current one, summed over requests, is more than
    chance would give (`LEAD` standard deviations) and more than `MARGIN` of the hits; that is the
    hysteresis. After a change the sums start from zero, and the next change takes more.

    Mutable state: `_caches`, `_limit` (keys in each), per candidate `_hits` (of this request),
    `_is_broken` (this request has missed already), `_gain` and `_variance` (against the current);
    `_current`, its `_current_hits`, `_accesses` since the sums were begun or
    halved, `_is_settled` (they were halved), and `_lead`.
    """

    def __init__(
        self,
        candidates: Sequence[type[EvictionPolicy]],
        current: type[EvictionPolicy],
        capacity: int,
    ) -> None:
        shift = 0
        while shift < MOST_SHIFT and capacity >> (shift + 1) >= FEWEST_KEYS:
            shift += 1
        self._mask = (1 << shift) - 1
        self._shift = shift
        self._first_capacity = capacity
        self._limit = max(1, capacity >> shift)
        self._candidates = tuple(candidates)
        self._caches = [candidate() for candidate in candidates]
        self._hits = [0] * len(self._caches)
        self._is_broken = [False] * len(self._caches)
        self._is_inserting = False
        self.accesses = 0
        self.tot = [0] * len(self._caches)
        self._lead = LEAD
        self._current = self._candidates.index(current)
        self._forget()

    def fits(self, capacity: int) -> bool:
        """Take note of the capacity; false when the sample is not the right one any more."""
        self._limit = max(1, capacity >> self._shift)
        return self._first_capacity <= 4 * capacity <= 16 * self._first_capacity

    def follow(self, current: type[EvictionPolicy]) -> None:
        """Compare with this candidate from now on, and be harder to persuade."""
        self._current = self._candidates.index(current)
        self._lead = min(MOST_LEAD, self._lead + LEAD_STEP)
        self._forget()

    def _forget(self) -> None:
        self._gain = [0.0] * len(self._caches)
        self._variance = [0.0] * len(self._caches)
        self._current_hits = 0.0
        self._accesses = 0
        self._is_settled = False

    def fill(self, history: Mapping[Key, int]) -> None:
        """Begin with these keys, the oldest access first, and the number of their uses."""
        for key, uses in history.items():
            if not sample_hash(key) & self._mask:
                for cache in self._caches:
                    cache.insert(key)
                    for _ in range(uses):
                        cache.touch(key)

    def touched(self, key: Key) -> None:
        """A held key is accessed."""
        if self._is_inserting:
            self._end_request()
        if sample_hash(key) & self._mask:
            return
        self._accesses += 1
        for place, cache in enumerate(self._caches):
            if key in cache:
                cache.touch(key)
                self._hits[place] += 1
            else:
                self._enter(cache, key)
                self._hits[place] = 0  # of what lies behind it in the chain
                self._is_broken[place] = True

    def inserted(self, key: Key) -> None:
        """A key comes in."""
        self._is_inserting = True
        if sample_hash(key) & self._mask:
            return
        self._accesses += 1
        for place, cache in enumerate(self._caches):
            if key not in cache:
                self._enter(cache, key)
                self._is_broken[place] = True
            else:
                cache.touch(key)
                if not self._is_broken[place]:
                    self._hits[place] += 1

    def removed(self, key: Key) -> None:
        """Somebody took a key away."""
        if not sample_hash(key) & self._mask:
            for cache in self._caches:
                if key in cache:
                    cache.remove(key)

    def leader(self) -> type[EvictionPolicy]:
        """The candidate to follow."""
        best, most = self._current, self._current_hits * MARGIN
        if self._accesses < self._limit and not self._is_settled:
            return self._candidates[best]
        for place, gain in enumerate(self._gain):
            if gain > most and gain >= self._lead * math.sqrt(self._variance[place]):
                best, most = place, gain
        return self._candidates[best]

    def check(self) -> None:
        """Audit the ghost caches.

        Raises:
            AssertionError: One of them is not as it should be.
        """
        for cache in self._caches:
            cache.check()

    def _enter(self, cache: EvictionPolicy, key: Key) -> None:
        while len(cache) >= self._limit:
            cache.evict(1)
        cache.insert(key)

    def _end_request(self) -> None:
        self._is_inserting = False
        current_hits = self._hits[self._current]
        self._current_hits += current_hits
        for place, hits in enumerate(self._hits):
            self.tot[place] += hits
            lead = hits - current_hits
            if lead:
                self._gain[place] += lead
                self._variance[place] += lead * lead
            self._hits[place] = 0
            self._is_broken[place] = False
        self.accesses += self._accesses and 1
        if self._accesses >= MEMORY * self._limit:
            self._accesses = 0
            self._is_settled = True
            self._current_hits /= 2
            self._gain = [gain / 2 for gain in self._gain]
            self._variance = [variance / 2 for variance in self._variance]


def sample_hash(key: Key) -> int:
    """Bits of a key's own value that say whether it is in the sample."""
    return key[0] if type(key) is bytes else key_hash(key)
