"""Routers that tell each other what they send: all of them count the same, whatever happens."""

import random

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.affinity import AffinitySettings
from opal_connector.cluster.router.decide import RouteQuestion
from opal_connector.cluster.router.peer_messages import (
    Began,
    Computed,
    Ended,
    Measured,
    Message,
    encode_frame,
)
from opal_connector.cluster.router.shared_router import SharedRouter
from opal_connector.events.channel import InstanceDescription

BLOCK = 4
WORKERS = ("a", "b", "c")


def cluster() -> KVBM:
    kvbm = KVBM()
    for worker in WORKERS:
        kvbm.join(
            InstanceDescription(
                instance_id=worker, incarnation=1, model="m", block_tokens=BLOCK, chunk_blocks=4
            )
        )
    return kvbm


class Processes:
    """Routers whose messages arrive at once."""

    def __init__(self, count: int, policy: str = "LeastLoaded") -> None:
        affinity = AffinitySettings(mode="hard")
        self.routers = [
            SharedRouter(cluster(), policy, affinity=affinity, seed=number)
            for number in range(count)
        ]
        for number, router in enumerate(self.routers):
            router.tell = lambda message, number=number: self._arrive(number, message)  # type: ignore[misc]

    def _arrive(self, sender: int, message: Message) -> None:
        assert encode_frame(message)
        assert isinstance(message, Began | Computed | Measured | Ended)
        for number, router in enumerate(self.routers):
            if number != sender:
                router.hear(sender, message, 0.0)

    def loads(self, number: int) -> dict[str, object]:
        return {worker: self.routers[number].loads.load(worker) for worker in WORKERS}


def question(request_id: str, tokens: list[int], session: str | None = None) -> RouteQuestion:
    prefix = PrefixRequest(token_ids=tokens, model="m")
    return RouteQuestion(
        request_id=request_id, prompt_tokens=len(tokens), prefix=prefix, session_id=session
    )


@pytest.mark.parametrize("seed", range(5))
def test_all_count_the_same_at_every_step_and_nothing_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    processes = Processes(3)
    under_way: list[tuple[int, RouteQuestion]] = []
    for step in range(300):
        if under_way and rng.random() < 0.5:
            place = rng.randrange(len(under_way))
            number, asked = under_way[place]
            router = processes.routers[number]
            what = rng.randrange(3)
            if what == 0:
                router.first_token(asked.request_id)
            elif what == 1:
                router.cached(asked, rng.randrange(asked.prompt_tokens))
            else:
                router.end(asked.request_id, 0.0, is_computed=rng.random() < 0.8)
                del under_way[place]
        else:
            number = rng.randrange(3)
            tokens = [rng.randrange(3)] * rng.randrange(8, 40)
            asked = question(str(step), tokens)
            decision = processes.routers[number].decide(asked, WORKERS, 0.0)
            assert decision is not None
            processes.routers[number].begin(asked, decision, 0.0)
            under_way.append((number, asked))
        assert processes.loads(0) == processes.loads(1) == processes.loads(2)
    for number, asked in under_way:
        processes.routers[number].end(asked.request_id, 0.0, is_computed=False)
    for router in processes.routers:
        assert len(router.loads) == 0
        assert not router.elsewhere
        assert not list(router.under_way())


def test_what_another_process_has_sent_is_expected_where_it_went() -> None:
    """Equal prompts that arrive at different processes go to one worker."""
    processes = Processes(2, "MaxPrefix")
    tokens = list(range(40))
    chosen = set()
    for turn in range(8):
        router = processes.routers[turn % 2]
        asked = question(str(turn), tokens)
        decision = router.decide(asked, WORKERS, 0.0)
        assert decision is not None
        router.begin(asked, decision, 0.0)
        chosen.add(decision.worker_id)
    assert len(chosen) == 1


def test_a_session_is_where_any_process_has_sent_it() -> None:
    processes = Processes(2)
    first = question("1", [1] * 20, "s")
    decision = processes.routers[0].decide(first, WORKERS, 0.0)
    assert decision is not None
    processes.routers[0].begin(first, decision, 0.0)
    again = processes.routers[1].decide(question("2", [2] * 20, "s"), WORKERS, 0.0)
    assert again is not None
    assert (again.worker_id, again.reason) == (decision.worker_id, "session")


def test_a_session_whose_name_is_no_text_is_counted_and_found_like_any_other() -> None:
    """A header may have any bytes; what cannot be told to others must not be counted for good."""
    processes = Processes(2)
    first = question("1", [1] * 20, "caf\udce9")
    decision = processes.routers[0].decide(first, WORKERS, 0.0)
    assert decision is not None
    processes.routers[0].begin(first, decision, 0.0)
    again = processes.routers[1].decide(question("2", [2] * 20, "caf\udce9"), WORKERS, 0.0)
    assert again is not None
    assert (again.worker_id, again.reason) == (decision.worker_id, "session")
    processes.routers[0].end("1", 0.0, is_computed=True)
    assert processes.loads(0) == processes.loads(1)
    assert not processes.routers[1].elsewhere


def test_what_a_lost_process_had_sent_is_forgotten_and_the_rest_stays() -> None:
    processes = Processes(3)
    for number in range(3):
        asked = question("same name", [number] * 20)
        decision = processes.routers[number].decide(asked, WORKERS, 0.0)
        assert decision is not None
        processes.routers[number].begin(asked, decision, 0.0)
    assert sum(load.requests for load in processes.loads(0).values()) == 3  # type: ignore[attr-defined]
    processes.routers[0].lose(2, 0.0)
    processes.routers[0].lose(2, 0.0)
    assert sum(load.requests for load in processes.loads(0).values()) == 2  # type: ignore[attr-defined]
    assert sum(processes.routers[0].elsewhere.values()) == 1


def test_who_comes_later_is_told_what_is_under_way_as_it_is_now() -> None:
    processes = Processes(1)
    router = processes.routers[0]
    for request_id in ("1", "2", "3"):
        asked = question(request_id, [1] * 20)
        decision = router.decide(asked, WORKERS, 0.0)
        assert decision is not None
        router.begin(asked, decision, 0.0)
    router.first_token("2")
    router.end("3", 0.0, is_computed=True)
    late = SharedRouter(cluster())
    for message in router.under_way():
        assert isinstance(message, Began | Computed)
        late.hear(0, message, 0.0)
    for worker in WORKERS:
        there, here = late.loads.load(worker), router.loads.load(worker)
        assert (there.requests, there.queued_tokens, there.decoding_tokens) == (
            here.requests,
            here.queued_tokens,
            here.decoding_tokens,
        )
