"""The check of first events, of models that keep little of a short prompt."""

from types import SimpleNamespace
from typing import Any

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion, Router
from opal_connector.cluster.router.self_check import EventCheck
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import InstanceDescription, describe_layout
from opal_connector.keys import CHAIN_ROOT
from opal_connector.keys.attention import AttentionGroup, AttentionLayout

BLOCK = 4
FULL = AttentionGroup(block_tokens=BLOCK)
STATE = AttentionGroup(kind="mamba", block_tokens=16 * BLOCK, kv_groups=(1,))
WINDOW = AttentionGroup(kind="sliding_window", block_tokens=BLOCK, span_tokens=3 * BLOCK)


class World:
    """A router that has sent prompts to one worker of a layout, and its check."""

    def __init__(self, *groups: AttentionGroup) -> None:
        self.kvbm = KVBM()
        self.kvbm.join(
            InstanceDescription(
                instance_id="a",
                incarnation=1,
                model="m",
                block_tokens=BLOCK,
                groups=describe_layout(AttentionLayout(groups)),
            )
        )
        self.router = Router(self.kvbm)
        self.check = EventCheck(self.kvbm, self.router)

    def answer(self, tokens: list[int], *, announces: range | None = None, group: int = 0) -> None:
        """The worker has answered a prompt, and announced some blocks of a group of it."""
        prefixes = tuple(self.kvbm.hashed(PrefixRequest(token_ids=tokens)))
        if announces is not None:
            hashes = prefixes[0].hashes
            parent = hashes[announces.start - 1] if announces.start else CHAIN_ROOT
            run = b"".join(hashes[announces.start : announces.stop])
            self.kvbm.process_kvc_events("a", [Insert(ObjectFact(group, parent, run), DEVICE_TIER)])
        decision = RouteDecision(
            worker_id="a",
            reason="",
            prompt_tokens=len(tokens),
            expected_tokens=0,
            prefixes=prefixes,
        )
        placement: Any = SimpleNamespace(instance=None, decision=decision)
        self.check.see(placement)
        self.check.look(1e18)  # long after anything is due

    @property
    def matches(self) -> bool | None:
        found = self.check.workers.get("a")
        return None if found is None else found.matches


def prompt(number: int, blocks: int) -> list[int]:
    return [number * 1_000 + place for place in range(blocks * BLOCK)]


def test_a_prompt_that_is_shorter_than_a_state_is_believed_by_its_chain() -> None:
    """No length of it can be served, and its events are right all the same."""
    world = World(FULL, STATE)
    for number in range(6):
        world.answer(prompt(number, 5), announces=range(5))

    assert world.matches is True
    assert not world.router.disbelieved


@pytest.mark.parametrize("groups", [(FULL, STATE), (WINDOW,)])
def test_a_worker_that_announces_nothing_of_long_prompts_is_not_believed(
    groups: tuple[AttentionGroup, ...],
) -> None:
    """Also one that could keep little of them: something it must keep."""
    world = World(*groups)
    for number in range(6):
        world.answer(prompt(number, 40))

    assert world.matches is False
    assert world.router.disbelieved == {"a"}


def test_prompts_of_one_block_tell_nothing_of_a_model_of_windows() -> None:
    """The only block of a prompt is computed once more, so it may not be kept."""
    world = World(WINDOW)
    for number in range(6):
        world.answer(prompt(number, 1))

    assert world.matches is None
    world.answer(prompt(9, 4), announces=range(2, 3))
    assert world.matches is True


def test_predictions_go_by_whole_steps_of_the_model() -> None:
    """What is under way serves up to where a block of every group ends."""
    world = World(FULL, STATE)
    tokens = prompt(1, 40)
    question = RouteQuestion(
        request_id="r", prompt_tokens=len(tokens), prefix=PrefixRequest(token_ids=tokens)
    )
    decision = world.router.decide(question, ["a"], 0.0)
    assert decision is not None
    world.router.begin(question, decision, 0.0)
    again = world.router.decide(question, ["a"], 0.1)

    assert again is not None
    assert again.predicted_tokens == 2 * 16 * BLOCK
