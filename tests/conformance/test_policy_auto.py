"""What AUTO is made of: the sample, the small tiers that follow it, and the change of policy."""

import pytest

from opal_connector.eviction import LRUPolicy
from opal_connector.eviction.arc import ARCPolicy
from opal_connector.eviction.auto import CANDIDATES, AutoPolicy
from opal_connector.eviction.handover import Candidate
from opal_connector.eviction.s3fifo import S3FIFOPolicy
from opal_connector.eviction.shadow import Shadow
from opal_connector.eviction.trial import Trial


class TestChange:
    @pytest.mark.parametrize("taken", CANDIDATES)
    @pytest.mark.parametrize("given", CANDIDATES)
    def test_a_change_keeps_keys_pins_and_order(
        self, given: type[Candidate], taken: type[Candidate]
    ) -> None:
        """What takes over evicts the oldest first, spares what is pinned, and finds it later."""
        old = given()
        for key in range(20):
            old.insert(key)
        for key in (0, 1, 2):
            old.pin(key)
        for key in (3, 4):
            old.touch(key)
            old.touch(key)
        assert set(old.evict(2) or []) == {5, 6} or given is LRUPolicy
        order = old.hand_over()
        order.capacity = 18
        new = taken()
        new.take_over(order)
        new.check()

        assert len(new) == 18
        first = new.evict(5)
        new.unpin(0)
        assert first is not None
        assert not {0, 1, 2, 18, 19} & set(first)
        assert len(new.evict(11) or []) == 11
        new.check()
        assert 0 not in new

    def test_ghosts_outlive_a_change_between_arc_and_s3_fifo(self) -> None:
        """A key that left before the change and comes back after it is trusted."""
        old = ARCPolicy()
        for key in range(10):
            old.insert(key)
        assert old.evict(1) == [0]
        new = S3FIFOPolicy()
        new.take_over(old.hand_over())
        new.insert(0)

        assert new.evict(9) == list(range(1, 10))


class TestSample:
    def test_sample_follows_the_size(self) -> None:
        """A small tier is sampled whole, a large one by a power of two; the work stays bounded."""
        for capacity, least, most in ((500, 500, 500), (3000, 1300, 1700), (12_000, 1300, 1700)):
            auto = AutoPolicy()
            for key in range(capacity):
                auto.insert(key)
            for key in range(capacity, 2 * capacity):
                auto.evict(1)
                auto.insert(key)
            auto.check()
            assert auto._trial is not None
            for shadow in auto._trial.shadows:
                assert least <= len(shadow) <= most

    def test_chains_of_the_sample_are_known_from_the_calls(self) -> None:
        """Parent pinned, child inserted, child pinned: the nearest relative in the sample."""
        auto = AutoPolicy()
        chains = [list(range(start, start + 40)) for start in range(0, 4000, 40)]
        for chain in chains:
            for key in chain:
                if key != chain[0]:
                    auto.pin(key - 1)
                auto.insert(key)
                auto.pin(key)
        kinship = auto._kinship
        sampled = [[key for key in chain if kinship.is_sampled(key)] for chain in chains]
        known = [kinship.parents[key] for chain in sampled for key in chain]

        assert kinship.mask
        assert known == [parent for chain in sampled for parent in [None, *chain[:-1]] if chain]

    def test_chain_that_is_continued_after_a_hit_is_known(self) -> None:
        """Touched from the tail to the head, then longer: the new key depends on the old ones."""
        auto = AutoPolicy()
        for key in range(3000):
            auto.insert(key)
        chain = [key for key in range(3000) if not auto._kinship.is_sampled(key)][:5]
        head = next(key for key in range(3000) if auto._kinship.is_sampled(key))
        new = next(key for key in range(3000, 4000) if auto._kinship.is_sampled(key))
        for key in [*chain, head]:
            auto.touch(key)
        auto.pin(chain[0])
        auto.insert(new)

        assert auto._kinship.parents[new] == head


class TestShadow:
    def test_only_ends_of_chains_leave(self) -> None:
        """A key with a child stays, however long ago it was used, and goes after its child."""
        shadow = Shadow(LRUPolicy)
        shadow.limit = 3
        for key, parent in ((1, None), (2, 1), (3, None)):
            shadow.access(key, parent)
        shadow.access(4, None)
        shadow.check()
        assert 1 in shadow
        assert 2 not in shadow

        shadow.access(5, 4)
        shadow.check()
        assert 1 not in shadow

    def test_chain_that_is_longer_than_the_tier_is_kept_from_its_head(self) -> None:
        """Nothing can be evicted for its end: the end does not come in, and nothing breaks."""
        shadow = Shadow(ARCPolicy)
        shadow.limit = 3
        for key in range(5):
            shadow.access(key, key - 1 if key else None)
        shadow.check()

        assert [key in shadow for key in range(5)] == [True, True, True, False, False]

    def test_removed_key_frees_its_parent(self) -> None:
        """Somebody takes the end of a chain away: the key before it is the end."""
        shadow = Shadow(LRUPolicy)
        shadow.limit = 2
        shadow.access(1, None)
        shadow.access(2, 1)
        shadow.remove(2)
        shadow.remove(3)
        shadow.check()
        shadow.access(4, None)
        shadow.access(5, None)

        assert 1 not in shadow


class TestTrial:
    def test_no_single_request_changes_the_leader(self) -> None:
        """However long it is, one request is one observation; the second that agrees counts."""
        trial = Trial(CANDIDATES, ARCPolicy)
        trial.resize(10)
        trial._accesses = 100
        for hits, leader in (([0, 9, 0], ARCPolicy), ([0, 9, 0], LRUPolicy)):
            trial._hits = hits
            trial._end_request()

            assert trial.leader is leader

    def test_what_spoke_for_a_change_must_be_outweighed(self) -> None:
        """After a change the same advantage on the other side does not suffice."""
        trial = Trial(CANDIDATES, ARCPolicy)
        trial.resize(1000)
        trial._accesses = 1000
        for _ in range(4):
            trial._hits = [0, 9, 0]
            trial._end_request()
        for _ in range(7):
            trial._hits = [9, 0, 0]
            trial._end_request()

        assert trial.leader is LRUPolicy
