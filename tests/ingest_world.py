"""A simulated instance, a link that loses, repeats and reorders, and a machine that follows it."""

from naive_kvbm import NaiveKVBM
from simulated_instance import MEMORY, SimulatedInstance, sample_object

from opal_connector.cluster.ingest.native_machine import Action, Ask, NativeMachine
from opal_connector.cluster.ingest.states import BlockIndex, SourceLimits, SourceState
from opal_connector.events.channel import (
    AskContents,
    Question,
    decode_published,
    decode_question,
    decode_reply,
    encode_message,
)

LIMITS = SourceLimits(buffered_batches=6, remembered_payloads=64)


class IngestWorld:
    """Everything that is under way is in a list, and delivered when the test says so.

    `index` is what the machine writes to; virtual time is `now`.
    """

    def __init__(
        self,
        index: BlockIndex | None = None,
        *,
        instance: SimulatedInstance | None = None,
        limits: SourceLimits = LIMITS,
    ) -> None:
        self.now = 1_000.0
        self.kvbm = NaiveKVBM()
        self.instance = instance or SimulatedInstance()
        self.machine = NativeMachine(
            index if index is not None else self.kvbm, "source", limits=limits
        )
        self.published: list[bytes] = []
        self.questions: list[bytes] = []
        self.replies: list[bytes] = []
        self.subscriptions: list[str] = []
        self.asked: list[Question] = []

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Ask):
                self.asked.append(action.question)
                self.questions.append(encode_message(action.question))
            else:
                self.subscriptions.append(action.publish_endpoint)

    # ---- the link ----

    def flush(self, size: int = 100) -> None:
        self.published += self.instance.flush(size)

    def heartbeat(self) -> None:
        self.published.append(self.instance.heartbeat())

    def deliver(self, place: int = 0, *, keep: bool = False) -> None:
        payload = self.published[place] if keep else self.published.pop(place)
        message = decode_published(payload)
        self.act(self.machine.on_published(message, len(payload), self.now))

    def answer(self) -> None:
        question = decode_question(self.questions.pop(0))
        self.replies += [encode_message(reply) for reply in self.instance.answer(question)]

    def reply(self, place: int = 0, *, keep: bool = False) -> None:
        payload = self.replies[place] if keep else self.replies.pop(place)
        self.act(self.machine.on_reply(decode_reply(payload), len(payload), self.now))

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.act(self.machine.on_tick(self.now))

    # ---- a link that works ----

    def drain(self) -> None:
        """Deliver everything that is under way, and what follows from it."""
        while self.published or self.questions or self.replies:
            while self.published:
                self.deliver()
            while self.questions:
                self.answer()
            while self.replies:
                self.reply()

    def settle(self, rounds: int = 80) -> None:
        """Let a working link bring everything in order."""
        quiet = 0
        for _ in range(rounds):
            self.flush()
            self.heartbeat()
            self.drain()
            self.tick(1.0)
            self.drain()
            quiet = quiet + 1 if self.machine.is_settled else 0
            if quiet >= 3:
                return
        raise AssertionError(f"not settled: {self.machine.state}, {self.machine.metrics}")

    def settled(self) -> "IngestWorld":
        """Follow the instance from the start."""
        self.tick()
        self.settle()
        assert self.machine.state is SourceState.LIVE
        return self


def loaded(*numbers: int, tier: str = MEMORY, **settings: int) -> SimulatedInstance:
    instance = SimulatedInstance(**settings)
    for number in numbers:
        instance.insert(sample_object(number), tier)
    instance.flush()
    return instance


def known(world: IngestWorld) -> dict[tuple[int, str], set[bytes]]:
    return world.kvbm.blocks(world.instance.instance_id)


def is_equal(world: IngestWorld) -> bool:
    return known(world) == world.instance.blocks()


def contents_asked(world: IngestWorld) -> list[AskContents]:
    return [question for question in world.asked if isinstance(question, AskContents)]
