"""What every eviction policy does. One subclass per policy supplies the factory, nothing more.

The suite's docstrings are the specification. Keys are integers.
"""

import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from opal_connector.eviction import EvictionPolicy

Make = Callable[[], EvictionPolicy]
KEYS = st.integers(min_value=0, max_value=11)  # few, so that keys leave and come back


def misses(policy: EvictionPolicy, capacity: int, trace: Sequence[int]) -> int:
    """Misses of a cache of `capacity` equal objects over a trace of requests."""
    count = 0
    for key in trace:
        if key in policy:
            policy.touch(key)
            continue
        count += 1
        if len(policy) == capacity:
            assert policy.evict(1) is not None
        policy.insert(key)
    policy.check()
    return count


def skewed_trace(length: int, seed: int) -> list[int]:
    """Requests as prefixes see them: few hot keys, many cold ones, and scans that come once."""
    draw = random.Random(seed).random
    trace: list[int] = []
    scan = 100_000
    while len(trace) < length:
        if draw() < 0.01:
            trace.extend(range(scan, scan + 20))
            scan += 20
        else:
            trace.append(int(2000 * draw() ** 3))
    return trace[:length]


class CountedKey(int):
    """A key that counts how often any of its kind is looked up."""

    hash_count = 0

    def __hash__(self) -> int:
        CountedKey.hash_count += 1
        return super().__hash__()


class PolicyMachine(RuleBasedStateMachine):
    """A policy beside plain sets, and beside a reference that is spared what must not matter.

    Mutable state: both policies, and what they should hold and have pinned.
    """

    def __init__(self, make: Make, make_reference: Make) -> None:
        super().__init__()
        self.policy = make()
        self.reference = make_reference()
        self.held: set[int] = set()
        self.pinned: set[int] = set()

    @rule(key=KEYS)
    def insert(self, key: int) -> None:
        if key in self.held:
            with pytest.raises(KeyError):
                self.policy.insert(key)
            return
        self.policy.insert(key)
        self.reference.insert(key)
        self.held.add(key)

    @rule(key=KEYS, call=st.sampled_from(["touch", "pin", "unpin", "remove"]))
    def use(self, key: int, call: str) -> None:
        if key not in self.held:
            with pytest.raises(KeyError):
                getattr(self.policy, call)(key)
            return
        getattr(self.policy, call)(key)
        getattr(self.reference, call)(key)
        if call == "pin":
            self.pinned.add(key)
        elif call in ("unpin", "remove"):
            self.pinned.discard(key)
        if call == "remove":
            self.held.discard(key)

    @rule(count=st.integers(0, 4), protected=st.frozensets(KEYS, max_size=4))
    def evict(self, count: int, protected: frozenset[int]) -> None:
        free = self.held - self.pinned - protected
        victims = self.policy.evict(count, protected)
        if count > len(free):
            assert victims is None
            return  # the reference is not asked: a refusal must not change what follows
        assert victims is not None
        assert len(victims) == len(set(victims)) == count
        assert set(victims) <= free
        assert victims == self.reference.evict(count, protected)
        self.held.difference_update(victims)

    @rule(count=st.integers(1, 4), protected=st.frozensets(KEYS, max_size=4))
    def evict_and_restore(self, count: int, protected: frozenset[int]) -> None:
        """An eviction that is undone leaves the same keys as the next to go."""
        victims = self.policy.evict(count, protected)
        if victims is None:
            return
        self.policy.restore(victims)
        assert self.policy.evict(count, protected) == victims
        self.policy.restore(victims)
        assert self.reference.evict(count, protected) == victims
        self.reference.restore(victims)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def evict_everything_else(self, data: st.DataObject) -> None:
        keep = data.draw(st.sampled_from(sorted(self.held)))
        count = len(self.held - self.pinned - {keep})
        victims = self.policy.evict(count, {keep})
        assert victims == self.reference.evict(count, {keep})
        self.held &= self.pinned | {keep}

    @invariant()
    def membership_agrees(self) -> None:
        self.policy.check()
        assert len(self.policy) == len(self.held)
        assert {key for key in range(12) if key in self.policy} == self.held


class PolicySuite:
    """Inherit, name the class `Test...`, and say how a fresh policy is made."""

    def make(self) -> EvictionPolicy:
        """A fresh policy."""
        raise NotImplementedError

    def make_reference(self) -> EvictionPolicy:
        """A slow twin that must choose the same victims; by default the policy itself."""
        return self.make()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            if name.startswith("test_") and hasattr(PolicySuite, name):
                raise TypeError(f"{cls.__name__} overrides {name}: the suite is for all policies")

    def filled(self, keys: Sequence[int]) -> EvictionPolicy:
        policy = self.make()
        for key in keys:
            policy.insert(key)
        return policy

    def test_empty_policy_has_no_victim(self) -> None:
        """Nothing held: no victim for one, an empty list for none."""
        policy = self.make()

        assert policy.evict(1) is None
        assert policy.evict(0) == []
        assert len(policy) == 0

    def test_victims_are_forgotten_and_returned_once(self) -> None:
        """Every key leaves once; what left may come again."""
        policy = self.filled(range(5))
        victims = [key for _ in range(5) for key in policy.evict(1) or []]

        assert sorted(victims) == [0, 1, 2, 3, 4]
        assert policy.evict(1) is None
        policy.insert(victims[0])
        assert policy.evict(1) == [victims[0]]

    def test_evict_gives_exactly_the_number_asked_for(self) -> None:
        """Not one more than the shortfall (HT-57)."""
        policy = self.filled(range(10))

        assert len(policy.evict(3) or []) == 3
        assert len(policy) == 7

    def test_evict_of_too_many_changes_nothing(self) -> None:
        """All or nothing: a refused eviction evicts nothing and keeps the order."""
        policy, twin = self.filled(range(6)), self.filled(range(6))
        for _ in range(3):
            assert policy.evict(7) is None
            assert policy.evict(3, {0, 1, 2, 3}) is None

        assert len(policy) == 6
        assert policy.evict(6) == twin.evict(6)

    def test_restored_victims_are_the_next_again(self) -> None:
        """An eviction that is undone: the same keys, in the same order, before all others."""
        policy, twin = self.filled(range(6)), self.filled(range(6))
        victims = policy.evict(3)
        assert victims is not None
        policy.restore(victims)
        policy.check()

        assert len(policy) == 6
        assert all(key in policy for key in victims)
        assert policy.evict(6) == twin.evict(6)

    def test_key_that_is_expelled_leaves_at_once_and_can_come_back(self) -> None:
        """Whoever it is: pinned, used, or already the next to go."""
        policy = self.filled(range(6))
        policy.pin(1)
        policy.touch(2)
        policy.restore(policy.evict(1) or [])
        for key in range(4):
            policy.expel(key)
            policy.check()
            assert key not in policy
        policy.restore([3])
        policy.check()
        policy.insert(0)

        assert len(policy) == 4
        assert sorted(policy.evict(4) or []) == [0, 3, 4, 5]
        policy.check()
        with pytest.raises(KeyError):
            policy.expel(4)

    def test_key_that_is_held_cannot_be_restored(self) -> None:
        """Only what was evicted comes back this way."""
        policy = self.filled([1, 2])

        with pytest.raises(KeyError):
            policy.restore([1])

    def test_pinned_key_is_never_a_victim(self) -> None:
        """A pin holds under any pressure, and is gone after one unpin."""
        policy = self.filled(range(4))
        policy.pin(0)
        policy.pin(0)

        assert sorted(policy.evict(3) or []) == [1, 2, 3]
        assert policy.evict(1) is None
        policy.unpin(0)
        assert policy.evict(1) == [0]

    def test_protected_key_is_spared_this_time_only(self) -> None:
        """Protection belongs to one call."""
        policy = self.filled(range(3))

        assert sorted(policy.evict(2, {1}) or []) == [0, 2]
        assert policy.evict(1, {1}) is None
        assert policy.evict(1) == [1]

    def test_pinned_key_that_was_removed_comes_back_unpinned(self) -> None:
        """A pin belongs to a stay, not to a key."""
        policy = self.filled([1])
        policy.pin(1)
        policy.remove(1)
        policy.insert(1)

        assert policy.evict(1) == [1]

    def test_key_that_is_not_held_is_refused(self) -> None:
        """Books that disagree are found at once, not at the next eviction."""
        policy = self.filled([1])
        for call in (policy.touch, policy.remove, policy.pin, policy.unpin):
            with pytest.raises(KeyError):
                call(2)
        with pytest.raises(KeyError):
            policy.insert(1)

        assert policy.evict(1) == [1]

    def test_same_calls_give_the_same_victims(self) -> None:
        """No randomness that a seed does not fix, no dependence on object identity."""
        trace = skewed_trace(3000, seed=1)
        orders = []
        for _ in range(2):
            policy = self.make()
            victims: list[int] = []
            for key in trace:
                if key in policy:
                    policy.touch(key)
                else:
                    if len(policy) == 50:
                        victims.extend(policy.evict(1) or [])
                    policy.insert(key)
            orders.append(victims)

        assert orders[0] == orders[1]
        assert len(orders[0]) > 500

    def test_memory_does_not_grow_with_what_has_left(self) -> None:
        """A policy is as large as what it holds, however many keys came and went."""
        policy = self.make()
        for key in range(20_000):
            policy.insert(key)
            policy.pin(key)
            policy.touch(key)
            policy.unpin(key)
            if key % 2:
                policy.remove(key)
            elif key >= 20:
                policy.evict(1)
        policy.check()

        assert len(pickle.dumps(policy)) < 64 << 10

    def test_pinned_keys_are_not_looked_at_again_and_again(self) -> None:
        """Most keys are heads of chains, the oldest and pinned: an eviction must not walk them."""
        policy = self.make()
        keys = [CountedKey(key) for key in range(2000)]
        for key in keys:
            policy.insert(key)
        for key in keys[:1500]:
            policy.pin(key)
        assert policy.evict(1) is not None
        CountedKey.hash_count = 0
        for key in range(5000, 5200):
            assert policy.evict(1) is not None
            policy.insert(CountedKey(key))

        assert CountedKey.hash_count < 200 * 100

    def test_random_use_agrees_with_sets(self) -> None:
        """Any order of calls: membership, pins and atomic evictions as plain sets have them."""
        run_state_machine_as_test(lambda: PolicyMachine(self.make, self.make_reference))
