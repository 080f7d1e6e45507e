"""Every eviction policy under the one suite, and under what is special to it."""

import random
from collections.abc import Sequence

import pytest
from typing_extensions import override

pytest.importorskip("hypothesis")
from naive_lru import NaiveLRU
from policy_suite import PolicySuite, misses, skewed_trace

from opal_connector.eviction import POLICIES, EvictionPolicy, LRUPolicy, make_policy
from opal_connector.eviction.auto import CANDIDATES, AutoPolicy
from opal_connector.eviction.sketch import FrequencySketch

# Misses over `skewed_trace(20_000, seed=7)`. A number that changes is a changed policy.
GOLDEN_MISSES = {
    ("LRU", 50): 17_527,
    ("LRU", 200): 15_149,
    ("LRU", 800): 10_885,
    ("FIFO", 50): 17_833,
    ("FIFO", 200): 15_647,
    ("FIFO", 800): 11_658,
    ("LFU", 50): 15_782,
    ("LFU", 200): 13_551,
    ("LFU", 800): 9_399,
    ("SIEVE", 50): 15_744,
    ("SIEVE", 200): 13_548,
    ("SIEVE", 800): 9_399,
    ("S3-FIFO", 50): 15_655,
    ("S3-FIFO", 200): 13_278,
    ("S3-FIFO", 800): 9_362,
    ("ARC", 50): 15_855,
    ("ARC", 200): 13_455,
    ("ARC", 800): 9_235,
    ("W-TinyLFU", 50): 15_841,
    ("W-TinyLFU", 200): 13_509,
    ("W-TinyLFU", 800): 9_651,
    ("AUTO", 50): 15_685,
    ("AUTO", 200): 13_369,
    ("AUTO", 800): 9_235,
}


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


class TestFIFO(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("FIFO")

    def test_a_use_does_not_change_the_order(self) -> None:
        """Only the insertion counts."""
        policy = self.filled([1, 2, 3])
        policy.touch(1)

        assert policy.evict(3) == [1, 2, 3]


class TestLFU(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("LFU")

    def test_fewest_uses_leave_first_then_the_oldest_use(self) -> None:
        """Frequency decides, recency breaks ties."""
        policy = self.filled([1, 2, 3, 4])
        for key in (2, 1, 1, 4):
            policy.touch(key)

        assert policy.evict(4) == [3, 2, 4, 1]

    def test_undone_eviction_keeps_the_count(self) -> None:
        """A restored key that is used again is as frequent as it was, and one more."""
        policy = self.filled([1, 2])
        for key in (1, 1, 2, 2, 2):
            policy.touch(key)
        policy.restore(policy.evict(1) or [])
        policy.touch(1)
        policy.touch(1)

        assert policy.evict(2) == [2, 1]


class TestSIEVE(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("SIEVE")

    def test_the_hand_goes_on_where_it_stopped(self) -> None:
        """A used key stays once, in its place; the next search begins behind it."""
        policy = self.filled([1, 2, 3, 4])
        policy.touch(1)
        policy.touch(3)

        assert policy.evict(1) == [2]
        assert policy.evict(1) == [4]
        assert policy.evict(2) == [1, 3]


class TestS3FIFO(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("S3-FIFO")

    def test_a_scan_passes_through_the_small_queue(self) -> None:
        """Keys that were used twice survive any number of keys that come once."""
        policy = self.filled(range(20))
        for key in (*range(5), *range(5)):
            policy.touch(key)
        for key in range(100, 200):
            policy.evict(1)
            policy.insert(key)

        assert all(key in policy for key in range(5))

    def test_a_key_that_comes_back_goes_to_the_main_queue(self) -> None:
        """One whose ghost is remembered is spared when its neighbours leave."""
        policy = self.filled(range(20))
        (gone,) = policy.evict(1) or []
        policy.insert(gone)
        for key in range(100, 130):
            policy.evict(1)
            policy.insert(key)

        assert gone in policy

    def test_the_head_of_a_chain_ages_while_its_tail_is_there(self) -> None:
        """A chain that nobody uses any more leaves as a whole, not one round per key."""
        policy = self.filled(range(20))
        for key in range(19):
            policy.pin(key)
        policy.touch(0)
        assert policy.evict(1) == [19]
        policy.insert(30)
        policy.unpin(0)
        policy.unpin(1)

        assert policy.evict(2) == [0, 1]


class TestARC(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("ARC")

    def test_keys_used_more_than_once_outlive_a_scan(self) -> None:
        """What came once leaves first, however recent."""
        policy = self.filled(range(10))
        policy.touch(0)
        policy.touch(1)

        assert policy.evict(8) == list(range(2, 10))

    def test_a_ghost_hit_leads_to_the_second_line(self) -> None:
        """As published: a key that comes back counts as used twice."""
        policy = self.filled(range(10))
        (gone,) = policy.evict(1) or []
        policy.insert(gone)
        policy.evict(1)

        assert policy.evict(7) == list(range(2, 9))

    def test_a_removed_key_leaves_no_ghost(self) -> None:
        """Taken away is not pushed out: when it comes again it is new."""
        policy = self.filled(range(10))
        policy.evict(1)
        policy.remove(5)
        policy.insert(5)

        assert policy.evict(9) == [1, 2, 3, 4, 6, 7, 8, 9, 5]


class TestWTinyLFU(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("W-TinyLFU")

    def test_a_newcomer_that_is_not_asked_for_is_not_admitted(self) -> None:
        """Keys of the main line that were used stay; a scan only passes through the window."""
        policy = self.filled(range(20))
        for _ in range(2):
            for key in range(20):
                policy.touch(key)
        for key in range(100, 200):
            policy.evict(1)
            policy.insert(key)

        assert sum(key in policy for key in range(20)) >= 16

    def test_the_sketch_forgets(self) -> None:
        """Counts are halved, so that what was frequent once is not frequent for ever."""
        sketch = FrequencySketch(64)
        for _ in range(12):
            sketch.add(1)
        before = sketch.count(1)
        for key in range(2, 2 + 640):
            sketch.add(key)

        assert before == 12
        assert sketch.count(1) < 12


class TestAUTO(PolicySuite):
    @override
    def make(self) -> EvictionPolicy:
        return make_policy("AUTO")

    def test_it_leaves_the_first_candidate_where_another_is_better(self) -> None:
        """Recent keys come back once each, soon: recency is right, and AUTO finds that out."""
        draw = random.Random(5).random
        trace = [max(0, step - int(1100 * draw())) for step in range(60_000)]
        auto = AutoPolicy()
        counted = misses(auto, 800, trace)

        assert auto.follows is not CANDIDATES[0]
        assert counted < misses(CANDIDATES[0](), 800, trace)

    def test_it_does_not_waver_between_equals(self) -> None:
        """Where nothing comes back no candidate is better, and nothing is rebuilt."""
        auto = AutoPolicy()
        misses(auto, 300, range(20_000))

        assert auto.follows is CANDIDATES[0]


@pytest.mark.parametrize("capacity", [10, 100, 500])
@pytest.mark.parametrize("name", ["LRU", "FIFO", "LFU"])
def test_misses_are_those_of_cachetools(name: str, capacity: int) -> None:
    """An implementation by others, on the same trace, misses as often."""
    cachetools = pytest.importorskip("cachetools")
    trace = skewed_trace(20_000, seed=3)
    theirs = getattr(cachetools, f"{name}Cache")(maxsize=capacity)
    their_misses = 0
    for key in trace:
        if key in theirs:
            theirs[key]
        else:
            their_misses += 1
            theirs[key] = True

    assert misses(make_policy(name), capacity, trace) == their_misses


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
