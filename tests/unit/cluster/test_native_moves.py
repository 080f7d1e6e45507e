"""An instance that moves, changes or lies: what its source finds again, and does not believe."""

import msgspec
from ingest_world import LIMITS, IngestWorld, is_equal, loaded
from naive_kvbm import Key
from simulated_instance import MEMORY, SimulatedInstance, sample_object

from opal_connector.cluster.ingest import SourceState
from opal_connector.cluster.kvbm import KVBM
from opal_connector.events.channel import (
    AskContents,
    AskDescription,
    AskReplay,
    Contents,
    Description,
    Question,
    Replay,
    Reply,
)


class _Moved(SimulatedInstance):
    """Publishes at another address after a restart, as with a port that is any free one."""

    publish_endpoint = "tcp://*:1"

    def answer(self, question: Question) -> list[Reply]:
        replies = super().answer(question)
        return [
            msgspec.structs.replace(reply, publish_endpoint=self.publish_endpoint)
            if isinstance(reply, Description)
            else reply
            for reply in replies
        ]


def test_an_instance_that_publishes_elsewhere_after_a_restart_is_found_again() -> None:
    """Nothing comes from the old address, so nothing there ever tells of the new one."""
    instance = _Moved()
    world = IngestWorld(instance=instance).settled()
    instance.restart()
    instance.publish_endpoint = "tcp://*:2"
    instance.insert(sample_object(4), MEMORY)
    instance.flush()
    for _ in range(10):
        world.tick(1.0)
        world.drain()

    assert world.subscriptions == ["tcp://*:1", "tcp://*:2"]
    world.settle()
    assert is_equal(world)
    assert world.kvbm.workers["a"].is_live


def test_an_instance_that_comes_back_late_and_elsewhere_is_found_too() -> None:
    """The first question after it fell silent may still be answered by the old process."""
    instance = _Moved()
    world = IngestWorld(instance=instance).settled()
    for _ in range(30):
        world.tick(1.0)
        world.drain()
    assert world.machine.state is SourceState.STALE
    instance.restart()
    instance.publish_endpoint = "tcp://*:2"
    for _ in range(30):
        world.tick(1.0)
        world.drain()

    assert world.subscriptions[-1] == "tcp://*:2"


def test_a_silent_instance_is_asked_seldom() -> None:
    world = IngestWorld().settled()
    before = len(world.asked)
    for _ in range(600):
        world.tick(0.1)
        world.drain()

    assert 1 <= len(world.asked) - before <= 12


def test_a_stream_that_could_not_be_opened_is_opened_again() -> None:
    """No file descriptor may have been left at that moment."""
    world = IngestWorld()
    world.tick()
    world.answer()
    world.reply()
    assert world.subscriptions == ["tcp://*:1"]
    world.act(world.machine.on_fault(world.now))
    world.settle()

    assert world.subscriptions == ["tcp://*:1", "tcp://*:1"]


class _Forgetful(SimulatedInstance):
    """Has lost events of its memory tier, and says that it does not know all of it."""

    def _is_complete(self, key: Key) -> bool:
        return key[1] != MEMORY and super()._is_complete(key)


def test_what_has_left_a_volatile_tier_is_not_kept_because_the_tier_is_not_all_known() -> None:
    """Such a tier can stay so for ever, and with it what nobody has any more."""
    instance = _Forgetful(replay_batches=0)
    for number in (0, 2, 4):
        instance.insert(sample_object(number), MEMORY)
    instance.flush()
    world = IngestWorld(instance=instance).settled()
    assert is_equal(world)
    instance.delete(sample_object(2), MEMORY)
    instance.flush()
    world.settle()

    assert is_equal(world)


class _TwoVoices(SimulatedInstance):
    """Its description is of another incarnation than its other answers."""

    def answer(self, question: Question) -> list[Reply]:
        replies = super().answer(question)
        if isinstance(question, AskDescription):
            return replies
        return [msgspec.structs.replace(reply, incarnation=99) for reply in replies]


def test_answers_of_two_incarnations_in_turn_are_not_asked_for_without_a_pause() -> None:
    world = IngestWorld(instance=_TwoVoices())
    world.tick()
    for _ in range(200):
        while world.questions:
            world.answer()
        if world.replies:
            world.reply()

    assert len(world.asked) < 10


class _Endless(SimulatedInstance):
    """Answers in parts without an end, and with nothing in them."""

    def answer(self, question: Question) -> list[Reply]:
        replies = super().answer(question)
        last = replies[-1]
        if isinstance(last, Contents):
            last = msgspec.structs.replace(last, facts=())
        if isinstance(last, Contents | Replay):
            return [msgspec.structs.replace(last, is_last=False, part=n) for n in range(1, 300)]
        return replies


def test_an_answer_without_an_end_is_given_up() -> None:
    """Each part is a sign of life, so that no patience ever ends."""
    limits = msgspec.structs.replace(LIMITS, contents_bytes=20_000)
    instance = _Endless()
    instance.insert(sample_object(0), MEMORY)
    instance.flush()
    world = IngestWorld(instance=instance, limits=limits)
    world.tick()
    world.drain()

    assert world.machine.metrics.overflows >= 1
    assert any(isinstance(question, AskContents) for question in world.asked)


def test_a_replay_without_an_end_is_given_up() -> None:
    instance = _Endless()
    world = IngestWorld(
        instance=instance, limits=msgspec.structs.replace(LIMITS, contents_bytes=20_000)
    ).settled()
    for number in (0, 2):
        instance.insert(sample_object(number), MEMORY)
    world.flush(1)
    del world.published[0]
    world.drain()
    world.tick(0.2)
    world.drain()

    assert any(isinstance(question, AskReplay) for question in world.asked)
    assert world.machine.metrics.overflows >= 1


def test_a_changed_model_takes_nothing_along() -> None:
    """The same id with other weights: its old blocks score for neither model."""
    kvbm = KVBM()
    world = IngestWorld(kvbm, instance=loaded(0, 2))
    world.tick()
    world.settle()
    assert kvbm.workers["a"].block_counts

    class _OtherModel(SimulatedInstance):
        def answer(self, question: Question) -> list[Reply]:
            return [
                msgspec.structs.replace(
                    reply, instance=msgspec.structs.replace(reply.instance, model="other")
                )
                if isinstance(reply, Description)
                else reply
                for reply in super().answer(question)
            ]

    world.instance = _OtherModel()
    world.instance.incarnation = 7
    world.instance.insert(sample_object(4), MEMORY)
    world.settle()

    assert [places.model for places in kvbm.models()] == ["other"]
    assert kvbm.workers["a"].block_counts == {(0, MEMORY): 2}
    kvbm.check()
