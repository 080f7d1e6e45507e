"""What an engine's stream leaves in the index: its blocks, or, unreplayed, at least no others."""

import random

import pytest

pytest.importorskip("hypothesis")
from engine_world import EngineWorld
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulated_engine import SimulatedEngine

from opal_connector.cluster.kvbm import KVBM

FATES = st.sampled_from(["deliver", "deliver", "lose", "twice", "swap"])


class EngineIngest(RuleBasedStateMachine):
    """Random life of an engine that replays all that it ever said.

    Mutable state: the world.
    """

    has_replay = True
    buffered: int | None = None

    @initialize(as_maps=st.booleans(), is_late=st.booleans(), seed=st.integers(0, 1_000))
    def begin(self, as_maps: bool, is_late: bool, seed: int) -> None:
        self.index = KVBM()
        engine = SimulatedEngine(buffered=self.buffered, as_maps=as_maps)
        self.world = EngineWorld(self.index, engine=engine, has_replay=self.has_replay)
        if is_late:  # nobody listened so far
            engine.live(random.Random(seed), 12)
            engine.flush(2)
        self.world.connect()

    @rule(
        seed=st.integers(0, 1_000),
        fates=st.lists(FATES, min_size=1, max_size=8),
        seconds=st.sampled_from([0.0, 0.05, 0.3]),
    )
    def lossy_round(self, seed: int, fates: list[str], seconds: float) -> None:
        world = self.world
        world.engine.live(random.Random(seed), 8)
        world.flush(1)
        for fate in fates:
            if not world.published:
                break
            if fate == "lose":
                del world.published[0]
            elif fate == "swap":
                world.deliver(min(1, len(world.published) - 1))
            else:
                world.deliver(0, keep=fate == "twice")
        world.tick(seconds)

    @rule()
    def reset(self) -> None:
        self.world.engine.clear()

    @rule(chance=st.integers(0, 2), is_noticed=st.booleans())
    def restart(self, chance: int, is_noticed: bool) -> None:
        """A socket tells of a new connection, but maybe later than of what it brings."""
        if not chance:
            may_hide = self.has_replay and self.world.machine.is_settled
            self.world.restart(is_noticed=is_noticed or not may_hide)

    @rule(chance=st.integers(0, 2))
    def reconnect(self, chance: int) -> None:
        if not chance:
            self.world.disconnect()
            self.world.published.clear()
            self.world.connect()

    @precondition(lambda self: self.world.question is not None)
    @rule(is_lost=st.booleans())
    def ask(self, is_lost: bool) -> None:
        if is_lost:
            self.world.question = None
        else:
            self.world.answer()

    @precondition(lambda self: self.world.replayed)
    @rule(count=st.integers(1, 6), is_cut=st.booleans())
    def replay(self, count: int, is_cut: bool) -> None:
        for _ in range(count):
            if self.world.replayed:
                self.world.reply()
        if is_cut:
            self.world.replayed.clear()

    @rule(seconds=st.sampled_from([0.05, 0.2, 2.0, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def settle(self) -> None:
        self.world.engine.clear()  # something to hear, where nothing can be replayed
        self.world.settle()
        self.compare()

    def known(self) -> dict[tuple[int, str], set[bytes]]:
        worker = self.index.workers.get("engine")
        if worker is None:
            return {}
        return {
            key: {block for _, block in self.index.contents("engine", *key)}
            for key, count in worker.block_counts.items()
            if count
        }

    def compare(self) -> None:
        self.index.check()
        assert self.known() == self.world.engine.blocks()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.settle()
        self.world.engine.live(random.Random(1), 20)
        self.world.settle()
        self.compare()
        self.world.engine.remove_everything()
        self.world.settle()
        self.compare()
        assert self.index.used_bytes == 0


class ShortReplayIngest(EngineIngest):
    """An engine that replays little: what cannot be followed is given up, nothing is made up."""

    buffered = 3

    def compare(self) -> None:
        self.index.check()
        truth = self.world.engine.blocks()
        for key, blocks in self.known().items():
            assert blocks <= truth.get(key, set())


class UnreplayedIngest(ShortReplayIngest):
    """An engine that replays nothing."""

    has_replay = False


TestEngineIngest = EngineIngest.TestCase
TestEngineIngest.settings = settings(stateful_step_count=50)
TestShortReplayIngest = ShortReplayIngest.TestCase
TestShortReplayIngest.settings = settings(stateful_step_count=50)
TestUnreplayedIngest = UnreplayedIngest.TestCase
TestUnreplayedIngest.settings = settings(stateful_step_count=50)
