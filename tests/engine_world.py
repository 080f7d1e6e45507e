"""A simulated engine, a link that loses, repeats and reorders, and a machine that follows it."""

from naive_kvbm import NaiveKVBM
from simulated_engine import SimulatedEngine

from opal_connector.cluster.ingest.states import BlockIndex, SourceLimits
from opal_connector.cluster.ingest.vllm_machine import VllmMachine
from opal_connector.cluster.ingest.vllm_ranks import EngineDescription
from opal_connector.cluster.ingest.vllm_replay import AskReplayFrom

# Patient: giving up has its own tests.
ENGINE_LIMITS = SourceLimits(buffered_batches=6, remembered_payloads=64, request_attempts=100)


class EngineWorld:
    """Everything that is under way is in a list, and delivered when the test says so.

    A newer replay question ends the older one: nothing of its answer arrives any more.
    """

    def __init__(
        self,
        index: BlockIndex | None = None,
        *,
        engine: SimulatedEngine | None = None,
        has_replay: bool = True,
        limits: SourceLimits = ENGINE_LIMITS,
    ) -> None:
        self.now = 1_000.0
        self.kvbm = NaiveKVBM()
        self.engine = engine or SimulatedEngine()
        self.has_replay = has_replay
        self.machine = VllmMachine(
            index if index is not None else self.kvbm,
            "engine",
            has_replay=has_replay,
            engine=EngineDescription(model="m"),
            limits=limits,
        )
        self.published: list[tuple[int, bytes]] = []
        self.question: int | None = None
        self.replayed: list[tuple[int, bytes]] = []

    def act(self, asks: list[AskReplayFrom]) -> None:
        for ask in asks:
            self.question = ask.first_sequence
            self.replayed.clear()

    def connect(self) -> None:
        self.act(self.machine.on_connected(self.now))

    def disconnect(self) -> None:
        self.act(self.machine.on_disconnected(self.now))

    def flush(self, size: int = 100) -> None:
        self.published += self.engine.flush(size)

    def deliver(self, place: int = 0, *, keep: bool = False) -> None:
        message = self.published[place] if keep else self.published.pop(place)
        self.act(self.machine.on_message(*message, self.now))

    def answer(self) -> None:
        assert self.question is not None
        self.replayed = [*self.engine.replay(self.question), (-1, b"")]
        self.question = None

    def reply(self) -> None:
        sequence, payload = self.replayed.pop(0)
        if sequence == -1:
            self.act(self.machine.on_replay_end(self.now))
        else:
            self.act(self.machine.on_replayed(sequence, payload, self.now))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.act(self.machine.on_tick(self.now))

    def restart(self, *, is_noticed: bool = True) -> None:
        """The process is replaced; what was under way is lost with it."""
        if is_noticed:
            self.disconnect()
        self.engine.restart()
        self.published.clear()
        self.replayed.clear()
        self.question = None
        if is_noticed:
            self.connect()

    def drain(self) -> None:
        while self.published or self.replayed or self.question is not None:
            while self.published:
                self.deliver()
            if self.question is not None:
                self.answer()
            while self.replayed:
                self.reply()

    def settle(self, rounds: int = 60) -> None:
        """Let a working link bring everything in order."""
        quiet = 0
        for _ in range(rounds):
            self.flush()
            self.drain()
            self.tick(3.0)
            self.drain()
            quiet = quiet + 1 if self.machine.is_settled else 0
            if quiet >= 4:
                return
        raise AssertionError(f"not settled: {self.machine.state}, {self.machine.metrics}")
