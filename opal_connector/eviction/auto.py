"""AUTO: the policy that would have served the recent requests best."""

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

from typing_extensions import override

from opal_connector.eviction.arc import ARCPolicy
from opal_connector.eviction.base import EvictionPolicy, Key
from opal_connector.eviction.lru import LRUPolicy
from opal_connector.eviction.s3fifo import S3FIFOPolicy
from opal_connector.eviction.trial import Trial

# The first one is followed until another one has proved better.
CANDIDATES: tuple[type[EvictionPolicy], ...] = (ARCPolicy, LRUPolicy, S3FIFOPolicy)
MOST_USES = 3  # more make no difference to a candidate
RETURN_USES = 2  # to come back while remembered counts as much: S3-FIFO and ARC trust such a key


class AutoPolicy(EvictionPolicy):
    """Follows the candidate whose ghost cache over a sample of the keys does best.

    `Trial` keeps the ghost caches and decides, with hysteresis, whom to follow. Before the first
    eviction all candidates would do the same, and there is no trial.

    A change of candidate builds a fresh policy: first it is shown the keys that have left (as many
    as are held, at most) and evicts them, so that it has ghosts; then it is shown the held keys
    from the oldest access to the newest, each with its uses. That is O(n). It happens between an
    eviction and the next insertion only, and at most once for as many sampled accesses as a ghost
    cache has keys, hence once in about n accesses: O(1) amortised.

    Mutable state: `_live` (the policy in force), `_history` (held keys, the oldest access first,
    with their uses), `_gone` (the same of keys evicted last), `_pinned`, `_undo` (victims since the
    last insertion, with their uses), `_trial`.
    """

    def __init__(self) -> None:
        self._live = CANDIDATES[0]()
        self._history: OrderedDict[Key, int] = OrderedDict()
        self._gone: OrderedDict[Key, int] = OrderedDict()
        self._pinned: set[Key] = set()
        self._undo: dict[Key, int] = {}
        self._trial: Trial | None = None

    @property
    def follows(self) -> type[EvictionPolicy]:
        """The candidate that chooses the victims now."""
        return type(self._live)

    @override
    def insert(self, key: Key) -> None:
        if key in self._history:
            raise KeyError(key)
        if self._undo:
            self._settle()
        self._live.insert(key)
        uses = self._gone.pop(key, None)
        self._history[key] = 0 if uses is None else min(MOST_USES, uses + RETURN_USES)
        if self._trial is not None:
            self._trial.inserted(key)

    @override
    def touch(self, key: Key) -> None:
        uses = self._history[key]
        if uses < MOST_USES:
            self._history[key] = uses + 1
        self._history.move_to_end(key)
        self._live.touch(key)
        if self._trial is not None:
            self._trial.touched(key)

    @override
    def remove(self, key: Key) -> None:
        self._live.remove(key)
        del self._history[key]
        self._pinned.discard(key)
        if self._trial is not None:
            self._trial.removed(key)

    @override
    def pin(self, key: Key) -> None:
        self._live.pin(key)
        self._pinned.add(key)

    @override
    def unpin(self, key: Key) -> None:
        self._live.unpin(key)
        self._pinned.discard(key)

    @override
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        victims = self._live.evict(count, protected)
        for key in victims or ():
            self._undo[key] = self._history.pop(key)
        return victims

    @override
    def restore(self, keys: Sequence[Key]) -> None:
        self._live.restore(keys)
        for key in reversed(keys):
            self._history[key] = self._undo.pop(key)
            self._history.move_to_end(key, last=False)

    @override
    def __len__(self) -> int:
        return len(self._history)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._history

    @override
    def check(self) -> None:
        self._live.check()
        assert len(self._live) == len(self._history)
        assert all(key in self._live for key in self._history), "the live policy lost a key"
        assert self._pinned <= self._history.keys(), "a pin of nothing"
        assert not self._gone.keys() & self._history.keys(), "a key is held and gone"
        if self._trial is not None:
            self._trial.check()

    def _settle(self) -> None:
        """End a run of evictions: remember what left, learn the capacity, follow the leader."""
        capacity = len(self._history) + len(self._undo)
        self._gone.update(self._undo)
        self._undo.clear()
        while len(self._gone) > capacity:
            self._gone.popitem(last=False)
        if self._trial is None or not self._trial.fits(capacity):
            self._trial = Trial(CANDIDATES, self.follows, capacity)
            self._trial.fill(self._history)
        leader = self._trial.leader()
        if leader is not self.follows:
            self._trial.follow(leader)
            self._live = rebuilt(leader, self._gone, self._history)
            for key in self._pinned:
                self._live.pin(key)


def rebuilt(
    candidate: type[EvictionPolicy], gone: Mapping[Key, int], held: Mapping[Key, int]
) -> EvictionPolicy:
    """A policy that has seen `gone` come and leave, and then `held` come, each with its uses."""
    policy = candidate()
    show(policy, gone)
    policy.evict(len(gone))
    show(policy, held)
    return policy


def show(policy: EvictionPolicy, uses: Mapping[Key, int]) -> None:
    """Insert keys in order and use each as often as it says."""
    for key, count in uses.items():
        policy.insert(key)
        for _ in range(count):
            policy.touch(key)
