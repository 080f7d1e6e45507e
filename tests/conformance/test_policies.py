"""Every eviction policy under the one suite, and under what is special to it."""

from collections.abc import Container, Sequence

import pytest
from typing_extensions import override

pytest.importorskip("hypothesis")
from policy_suite import PolicySuite, misses, skewed_trace

from opal_connector.eviction import POLICIES, EvictionPolicy, LRUPolicy, make_policy

# Misses over `skewed_trace(20_000, seed=7)`. A number that changes is a changed policy.
GOLDEN_MISSES = {
    ("LRU", 50): 17_527,
    ("LRU", 200): 15_149,
    ("LRU", 800): 10_885,
}


class NaiveLRU(EvictionPolicy):
    """The definition: one list, the least recently used key first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.pinned: set[int] = set()

    @override
    def insert(self, key: int) -> None:
        self.order.append(key)

    @override
    def touch(self, key: int) -> None:
        self.order.remove(key)
        self.order.append(key)

    @override
    def remove(self, key: int) -> None:
        self.order.remove(key)
        self.pinned.discard(key)

    @override
    def pin(self, key: int) -> None:
        self.pinned.add(key)

    @override
    def unpin(self, key: int) -> None:
        self.pinned.discard(key)

    @override
    def evict(self, count: int, protected: Container[int] = ()) -> list[int] | None:
        free = [key for key in self.order if key not in self.pinned and key not in protected]
        if count > len(free):
            return None
        for key in free[:count]:
            self.order.remove(key)
        return free[:count]

    @override
    def restore(self, keys: Sequence[int]) -> None:
        self.order = [*keys, *self.order]

    @override
    def __len__(self) -> int:
        return len(self.order)

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.order

    @override
    def check(self) -> None:
        return


class TestLRU(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("LRU")

    @override
    def make_reference(self) -> EvictionPolicy:
        return NaiveLRU()

    def test_key_keeps_its_place_while_it_is_pinned(self) -> None:
        """A pin is no use: after it the key stands where its last access put it."""
        policy = self.filled([1, 2, 3])
        policy.pin(1)
        policy.pin(2)
        policy.touch(2)
        policy.unpin(2)
        policy.unpin(1)

        assert policy.evict(3) == [1, 3, 2]

    def test_key_that_came_back_is_new(self) -> None:
        """An earlier stay does not age the key."""
        policy = self.filled([1, 2, 3])
        policy.remove(1)
        policy.insert(1)

        assert policy.evict(3) == [2, 3, 1]

    def test_first_eviction_after_many_touches_is_not_paid_for_at_once(self) -> None:
        """Work must not pile up: evicting one key looks at a few, whatever was touched before."""
        policy = self.filled(range(50_000))
        for key in range(50_000):
            policy.touch(key)
        looked_at: list[int] = []

        class Watcher:
            def __contains__(self, key: object) -> bool:
                looked_at.append(int(str(key)))
                return False

        assert policy.evict(1, Watcher()) == [0]
        assert len(looked_at) == 1

    @pytest.mark.parametrize("capacity", [10, 100, 500])
    def test_lru_misses_as_often_as_cachetools(self, capacity: int) -> None:
        """An implementation by others, on the same trace, misses at the same requests."""
        cachetools = pytest.importorskip("cachetools")
        trace = skewed_trace(20_000, seed=3)
        theirs = cachetools.LRUCache(maxsize=capacity)
        their_misses = 0
        for key in trace:
            if key in theirs:
                theirs[key]
            else:
                their_misses += 1
                theirs[key] = True

        assert misses(self.make(), capacity, trace) == their_misses


def belady_misses(capacity: int, trace: Sequence[int]) -> int:
    """The fewest misses that any policy can have: it evicts what is needed last."""
    next_use = [len(trace)] * len(trace)
    seen: dict[int, int] = {}
    for place in range(len(trace) - 1, -1, -1):
        next_use[place] = seen.get(trace[place], len(trace))
        seen[trace[place]] = place
    cached: dict[int, int] = {}
    count = 0
    for place, key in enumerate(trace):
        if key not in cached:
            count += 1
            if len(cached) == capacity:
                del cached[max(cached, key=cached.__getitem__)]
        cached[key] = next_use[place]
    return count


@pytest.mark.parametrize(("name", "capacity"), GOLDEN_MISSES)
def test_golden_miss_counts(name: str, capacity: int) -> None:
    """A policy evicts today what it evicted when it was written, and never beats the oracle."""
    trace = skewed_trace(20_000, seed=7)

    counted = misses(make_policy(name), capacity, trace)

    assert counted == GOLDEN_MISSES[name, capacity]
    assert belady_misses(capacity, trace) <= counted < len(trace)


def test_every_policy_is_in_the_suite_and_in_the_table() -> None:
    """A registered policy without conformance test or golden numbers is not finished."""
    tested = {type(suite().make()) for suite in PolicySuite.__subclasses__()}

    assert set(POLICIES.values()) == tested
    assert {name for name, _ in GOLDEN_MISSES} == POLICIES.keys()


def test_unknown_policy_is_answered_with_those_there_are() -> None:
    """The error names what was asked for and what exists."""
    with pytest.raises(ValueError, match=r"unknown eviction policy 'MRU'; known: LRU"):
        make_policy("MRU")


def test_nobody_overrides_a_test_of_the_suite() -> None:
    """A policy that is special in one point says so in its own test, not in the common one."""
    with pytest.raises(TypeError, match="overrides test_pinned_key_is_never_a_victim"):
        type(
            "TestSpecial",
            (PolicySuite,),
            {"test_pinned_key_is_never_a_victim": lambda self: None},
        )


def test_auditor_of_lru_finds_a_pin_of_nothing() -> None:
    """check() is no ornament: books of the policy that disagree are reported."""
    policy = LRUPolicy()
    policy.insert(1)
    policy._pinned.add(2)

    with pytest.raises(AssertionError):
        policy.check()
