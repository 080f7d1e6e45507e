"""The index equals the instance once its link works again, whatever was lost on the way."""

import pytest

pytest.importorskip("hypothesis")
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ingest_world import LIMITS, IngestWorld
from simulated_instance import DISK, MEMORY, Object, SimulatedInstance, sample_object

from opal_connector.cluster.ingest.states import SourceState
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER

OBJECTS = st.integers(0, 15).map(sample_object)
TIERS = st.sampled_from([MEMORY, DISK, DEVICE_TIER])
VERBS = st.sampled_from(["insert", "insert", "delete", "move", "copy"])
Step = tuple[str, Object, str]
STEPS = st.tuples(VERBS, OBJECTS, TIERS)
FATES = st.sampled_from(["deliver", "deliver", "lose", "twice", "swap"])


class NativeIngest(RuleBasedStateMachine):
    """Random life of an instance and of the link to it.

    Mutable state: the world.
    """

    group_count = 1

    @initialize(
        replay_batches=st.integers(0, 8), part_facts=st.integers(1, 5), is_settled=st.booleans()
    )
    def begin(self, replay_batches: int, part_facts: int, is_settled: bool) -> None:
        instance = SimulatedInstance(
            replay_batches=replay_batches, part_facts=part_facts, group_count=self.group_count
        )
        self.make(instance)
        self.world.tick()
        if is_settled:
            self.world.settle()

    def make(self, instance: SimulatedInstance) -> None:
        self.world = IngestWorld(instance=instance, limits=LIMITS)

    # ---- the instance ----

    @rule(steps=st.lists(STEPS, min_size=1, max_size=6), size=st.integers(1, 3))
    def work(self, steps: list[Step], size: int) -> None:
        self.do(steps)
        self.world.flush(size)

    def do(self, steps: list[Step]) -> None:
        instance = self.world.instance
        for verb, obj, tier in steps:
            other = DISK if tier == MEMORY else MEMORY
            if verb == "insert":
                instance.insert(obj, tier)
            elif verb == "delete":
                instance.delete(obj, tier)
            elif tier != DEVICE_TIER:
                getattr(instance, verb)(obj, tier, other)

    @rule(
        steps=st.lists(STEPS, min_size=2, max_size=10),
        fates=st.lists(FATES, min_size=6, max_size=6),
        with_heartbeat=st.booleans(),
        seconds=st.sampled_from([0.0, 0.05, 0.3]),
    )
    def lossy_round(
        self, steps: list[Step], fates: list[str], with_heartbeat: bool, seconds: float
    ) -> None:
        """Many batches and what becomes of each of them."""
        self.do(steps)
        self.world.flush(1)
        if with_heartbeat:
            self.world.heartbeat()
        for fate in fates:
            if not self.world.published:
                break
            if fate == "lose":
                del self.world.published[0]
            elif fate == "swap":
                self.world.deliver(min(1, len(self.world.published) - 1))
            else:
                self.world.deliver(0, keep=fate == "twice")
        self.world.tick(seconds)

    @rule()
    def clear_device(self) -> None:
        self.world.instance.clear_device()

    @rule(lost=st.integers(0, 3), chance=st.integers(0, 3))
    def restart(self, lost: int, chance: int) -> None:
        if not chance:
            self.world.instance.restart(lost)

    @rule(count=st.integers(1, 4))
    def find_on_disk(self, count: int) -> None:
        self.world.instance.find_on_disk(count)

    @rule(size=st.integers(1, 4))
    def flush(self, size: int) -> None:
        self.world.flush(size)

    @rule()
    def heartbeat(self) -> None:
        self.world.heartbeat()

    # ---- the link ----

    @precondition(lambda self: self.world.published)
    @rule(place=st.integers(0, 5), keep=st.booleans())
    def deliver(self, place: int, keep: bool) -> None:
        self.world.deliver(min(place, len(self.world.published) - 1), keep=keep)

    @precondition(lambda self: self.world.published)
    @rule(place=st.integers(0, 5))
    def lose(self, place: int) -> None:
        del self.world.published[min(place, len(self.world.published) - 1)]

    @precondition(lambda self: self.world.questions)
    @rule(is_lost=st.booleans())
    def ask(self, is_lost: bool) -> None:
        if is_lost:
            del self.world.questions[0]
        else:
            self.world.answer()

    @precondition(lambda self: self.world.replies)
    @rule(place=st.integers(0, 3), keep=st.booleans())
    def reply(self, place: int, keep: bool) -> None:
        self.world.reply(min(place, len(self.world.replies) - 1), keep=keep)

    @precondition(lambda self: self.world.replies)
    @rule(place=st.integers(0, 3))
    def lose_reply(self, place: int) -> None:
        del self.world.replies[min(place, len(self.world.replies) - 1)]

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.2, 1.0, 4.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def drain(self) -> None:
        self.world.drain()

    # ---- what must hold ----

    @rule()
    def settle(self) -> None:
        """While a persistent tier is being looked through, what it has not found yet may stay."""
        self.world.settle()
        self.compare()

    @invariant()
    def nothing_is_live_unheard(self) -> None:
        worker = self.world.kvbm.workers.get(self.world.instance.instance_id)
        if worker is not None:
            assert worker.is_live == (self.world.machine.state is not SourceState.STALE)

    def known(self) -> dict[tuple[int, str], set[bytes]]:
        return self.world.kvbm.blocks(self.world.instance.instance_id)

    def compare(self) -> None:
        known = self.known()
        truth = self.world.instance.blocks()
        if not self.world.instance.is_disk_open:
            for group in range(self.group_count):
                key = (group, DISK)
                assert known.pop(key, set()) >= truth.pop(key, set())
        assert known == truth

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.instance.find_on_disk(100)
        self.world.settle()
        self.compare()
        self.world.instance.delete_everything()
        self.world.settle()
        assert self.known() == {}


class KVBMIngest(NativeIngest):
    """The same into the real index, whose books are recomputed after every step."""

    def make(self, instance: SimulatedInstance) -> None:
        self.index = KVBM()
        self.world = IngestWorld(self.index, instance=instance, limits=LIMITS)

    @invariant()
    def nothing_is_live_unheard(self) -> None:
        self.index.check()
        worker = self.index.workers.get(self.world.instance.instance_id)
        if worker is not None:
            assert worker.is_live == (self.world.machine.state is not SourceState.STALE)

    def known(self) -> dict[tuple[int, str], set[bytes]]:
        worker = self.index.workers[self.world.instance.instance_id]
        return {
            key: {block for _, block in self.index.contents(self.world.instance.instance_id, *key)}
            for key, count in worker.block_counts.items()
            if count
        }

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            assert self.index.used_bytes == 0
            assert self.index.entry_count == 0


class GroupsIngest(KVBMIngest):
    """The same of an instance with several attention groups: each is kept equal on its own."""

    group_count = 3


TestGroupsIngest = GroupsIngest.TestCase
TestGroupsIngest.settings = settings(stateful_step_count=60)
TestNativeIngest = NativeIngest.TestCase
TestKVBMIngest = KVBMIngest.TestCase
TestNativeIngest.settings = settings(stateful_step_count=60)
TestKVBMIngest.settings = settings(stateful_step_count=60)
