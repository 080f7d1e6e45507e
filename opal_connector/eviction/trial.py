"""Candidates compared on a sample of the accesses."""

import math
from collections.abc import Iterable, Sequence

from opal_connector.eviction.base import Key
from opal_connector.eviction.handover import Candidate
from opal_connector.eviction.shadow import Shadow

LEAD = 1.25  # standard deviations that a change takes; one request alone gives one
MARGIN = 0.005  # of the hits
LEAST = 0.25  # accesses per key of a shadow before a first comparison
MEMORY = 16  # accesses per key of a shadow after which a comparison counts half


class Trial:
    """One shadow per candidate, over the same sample of the keys.

    A sample of the keys behaves like all of them in a tier that is smaller by the same factor
    ("Efficient MRC construction with SHARDS", Waldspurger, Park, Garthwaite and Ahmad, FAST 2015).

    What belongs to one request is counted together, because it hits and misses together: a chain is
    touched from its tail to its head, then its missing part is inserted from head to tail; a touch
    after an insertion begins the next request.

    The candidate with the most hits leads when its advantage over the one that leads now, summed
    over requests, is more than chance would give (`LEAD` standard deviations) and more than
    `MARGIN` of the hits. A change forgets nothing: what spoke for it must be outweighed before the
    next. So changes are easy while little is known and rare later.

    Mutable state: `leader`, `shadows`, `_limit` (of each), per candidate `_hits` (of this request)
    and `_totals` (of all), per two candidates `_variances` (of the difference); `_missing` (touched
    in this chain and not in a shadow), `_current` (the leader's place), `_accesses` since the
    beginning or the last halving, `_is_settled` (there was one), and `_is_inserting`.
    """

    def __init__(self, candidates: Sequence[type[Candidate]], current: type[Candidate]) -> None:
        self._candidates = tuple(candidates)
        self.shadows = [Shadow(candidate) for candidate in candidates]
        self._hits = [0] * len(self.shadows)
        self._totals = [0.0] * len(self.shadows)
        self._variances = [self._totals.copy() for _ in self.shadows]
        self._missing: list[tuple[Shadow, Key, Key | None]] = []
        self._limit = 1
        self.leader = current
        self._current = self._candidates.index(current)
        self._accesses = 0
        self._is_settled = False
        self._is_inserting = False

    def resize(self, limit: int) -> None:
        """Let the shadows hold as many keys as the sample of the tier does."""
        if limit != self._limit:
            self._limit = limit = max(1, limit)
            for shadow in self.shadows:
                shadow.limit = limit

    def fill(self, keys: Iterable[tuple[Key, Key | None, bool]]) -> None:
        """Begin with these keys, the oldest access first, their parents, and who is used often."""
        for key, parent, is_often in keys:
            for shadow in self.shadows:
                shadow.access(key, parent)
                if is_often:
                    shadow.access(key, parent)
                    shadow.access(key, parent)

    def touched(self, key: Key, parent: Key | None) -> None:
        """A held key is accessed."""
        if self._is_inserting:
            self._is_inserting = False
            self._end_request()
        self._accesses += 1
        for place, shadow in enumerate(self.shadows):
            if key in shadow:
                shadow.access(key, parent)
                self._hits[place] += 1
            else:
                self._missing.append((shadow, key, parent))
        if parent is None and self._missing:
            self._bring()

    def inserted(self, key: Key, parent: Key | None) -> None:
        """A key comes in."""
        self._is_inserting = True
        if self._missing:
            self._bring()
        self._accesses += 1
        for place, shadow in enumerate(self.shadows):
            if shadow.access(key, parent):
                self._hits[place] += 1

    def removed(self, key: Key) -> None:
        """Somebody took a key away."""
        for shadow in self.shadows:
            shadow.remove(key)

    @property
    def leading_shadow(self) -> Shadow:
        """The shadow of the leader."""
        return self.shadows[self._current]

    def check(self) -> None:
        """Audit the shadows.

        Raises:
            AssertionError: One of them is not as it should be.
        """
        for shadow in self.shadows:
            shadow.check()

    def _bring(self) -> None:
        """Bring in what was touched and missing, from head to tail as a request would store it."""
        for shadow, key, parent in reversed(self._missing):
            shadow.access(key, parent)
        self._missing.clear()

    def _end_request(self) -> None:
        hits = self._hits
        self._hits = [0] * len(hits)
        for place, count in enumerate(hits):
            self._totals[place] += count
        if hits.count(hits[0]) == len(hits):
            return
        for count, variances in zip(hits, self._variances, strict=True):
            for place, other_count in enumerate(hits):
                variances[place] += (count - other_count) ** 2
        if self._accesses >= MEMORY * self._limit:
            self._accesses = 0
            self._is_settled = True
            self._totals = [total / 2 for total in self._totals]
            self._variances = [[value / 2 for value in row] for row in self._variances]
        if self._is_settled or self._accesses >= LEAST * self._limit:
            self._compare()

    def _compare(self) -> None:
        current_total = self._totals[self._current]
        best = max(range(len(self._totals)), key=self._totals.__getitem__)
        gain = self._totals[best] - current_total
        doubt = LEAD * math.sqrt(self._variances[best][self._current])
        if gain > max(doubt, MARGIN * current_total):
            self._current = best
            self.leader = self._candidates[best]
