"""AUTO: the policy that would have served the recent requests best."""

from collections.abc import Container, Sequence

from typing_extensions import override

from opal_connector.eviction.arc import ARCPolicy
from opal_connector.eviction.base import EvictionPolicy, Key
from opal_connector.eviction.handover import Candidate
from opal_connector.eviction.kinship import Kinship
from opal_connector.eviction.lru import LRUPolicy
from opal_connector.eviction.s3fifo import S3FIFOPolicy
from opal_connector.eviction.sketch import key_hash
from opal_connector.eviction.trial import Trial

# The first one loses least where it is wrong, and is followed until another one has proved better.
CANDIDATES: tuple[type[Candidate], ...] = (ARCPolicy, LRUPolicy, S3FIFOPolicy)


class AutoPolicy(EvictionPolicy):
    """Follows the candidate that does best in a small tier of its own, fed with a sample.

    `Kinship` chooses the sample and learns its chains from the order of the calls, `Trial` keeps
    the small tiers and decides, with hysteresis, whom to follow. Before the first eviction all
    candidates would do the same, and there is no trial.

    At a change the next candidate takes over the lines of the one before, pins included; nothing
    else is kept for that. It is O(n), but in C but for the merging of two lines into one, and
    happens between an eviction and the next insertion only.

    Mutable state: `_live` (the policy in force, with its type and calls), `_kinship`, `_trial`,
    `_is_evicting` (since the last insertion); of the calls: `_fresh` (came in and was not pinned
    since), `_parent` (was pinned for a child to come), `_is_run` (the last call was a touch), and
    `_tail` (the first of these touches, until one in the sample follows).
    """

    def __init__(self) -> None:
        self._live = CANDIDATES[0]()
        self._kinship = Kinship()
        self._trial: Trial | None = None
        self._is_evicting = False
        self._fresh: Key | None = None
        self._parent: Key | None = None
        self._is_run = False
        self._tail: Key | None = None
        self._bind()

    @property
    def follows(self) -> type[Candidate]:
        """The candidate that chooses the victims now."""
        return self._leader

    @override
    def insert(self, key: Key) -> None:
        if self._is_evicting:
            self._is_evicting = False
            if self._trial is not None and self._trial.leader is not self._leader:
                self._follow(self._trial)
        self._insert(key)
        parent, self._parent = self._parent, None
        self._fresh = key
        self._is_run = False
        kinship = self._kinship
        if (key[0] if type(key) is bytes else key_hash(key)) & kinship.mask:
            kinship.passed(key, parent)
        elif not kinship.inserted(key, parent, self._live):
            self._trial = None  # its sample was too large
        elif self._trial is not None:
            self._trial.resize(len(self._live) // (kinship.mask + 1))
            self._trial.inserted(key, kinship.parents[key])

    @override
    def touch(self, key: Key) -> None:
        self._touch(key)
        if not self._is_run:
            self._is_run = True
            self._tail = key
        if (key[0] if type(key) is bytes else key_hash(key)) & self._kinship.mask:
            return
        parent = self._kinship.touched(key, self._tail)
        self._tail = None
        if self._trial is not None:
            self._trial.touched(key, parent)

    @override
    def remove(self, key: Key) -> None:
        self._live.remove(key)
        self._kinship.removed(key)
        if self._trial is not None:
            self._trial.removed(key)

    @override
    def pin(self, key: Key) -> None:
        self._pin(key)
        self._is_run = False
        if key == self._fresh:
            self._fresh = None
        else:
            self._parent = key

    @override
    def unpin(self, key: Key) -> None:
        self._unpin(key)

    @override
    def evict(self, count: int, protected: Container[Key] = ()) -> list[Key] | None:
        self._is_evicting = True
        if self._trial is None:
            self._trial = self._begin()
        return self._evict(count, protected)

    @override
    def expel(self, key: Key) -> None:
        self._is_evicting = True
        if self._trial is None:
            self._trial = self._begin()
        self._live.expel(key)

    @override
    def restore(self, keys: Sequence[Key]) -> None:
        self._live.restore(keys)

    @override
    def __len__(self) -> int:
        return len(self._live)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self._live

    @override
    def check(self) -> None:
        self._live.check()
        assert all(self._kinship.is_sampled(key) for key in self._kinship.parents)
        if self._trial is not None:
            self._trial.check()

    def _begin(self) -> Trial:
        """A trial with what is held of the sample."""
        kinship = self._kinship
        trial = Trial(CANDIDATES, self._leader)
        trial.resize(len(self._live) // (kinship.mask + 1))
        trial.fill(
            (key, parent, key in kinship.used)
            for key, parent in kinship.parents.items()
            if key in self._live
        )
        return trial

    def _follow(self, trial: Trial) -> None:
        """Let the leader take over."""
        order = self._live.hand_over()
        order.share = trial.leading_shadow.policy.hand_over().share
        order.capacity = len(self._live)
        self._live = trial.leader()
        self._live.take_over(order)
        self._bind()

    def _bind(self) -> None:
        """Look the calls of the policy in force up once, not at every key."""
        live = self._live
        self._leader = type(live)
        self._insert, self._touch = live.insert, live.touch
        self._pin, self._unpin, self._evict = live.pin, live.unpin, live.evict
