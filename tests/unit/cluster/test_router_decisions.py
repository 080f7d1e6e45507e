"""Where the router sends a request, given what the KVBM knows and what is under way."""

from collections import Counter

import pytest

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.affinity import AffinitySettings
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion, Router
from opal_connector.events import DEVICE_TIER, Insert, ObjectFact
from opal_connector.events.channel import (
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
)
from opal_connector.keys import CHAIN_ROOT, OpalTokenDatabase

BLOCK = 4
TOKENS = list(range(400))
WORKERS = ("a", "b", "c")
TIERS = (TierDescription("CPUMemory"), TierDescription("LocalNVMe", is_persistent=True))


def cluster(*workers: str) -> KVBM:
    kvbm = KVBM()
    for worker in workers:
        kvbm.join(
            InstanceDescription(
                instance_id=worker,
                incarnation=1,
                model="m",
                block_tokens=BLOCK,
                chunk_blocks=4,
                tiers=TIERS,
            )
        )
        kvbm.process_system_events(
            worker,
            [
                SystemEvent(
                    prefill_tokens_per_second=1_000.0,
                    chunk_bytes=16_000,
                    tiers=(TierLoad("CPUMemory", 0, 1, 1e-9), TierLoad("LocalNVMe", 0, 1, 1e-3)),
                )
            ],
        )
    return kvbm


def hold(kvbm: KVBM, worker: str, tokens: int, tier: str = DEVICE_TIER) -> None:
    database = OpalTokenDatabase(block_tokens=BLOCK, chunk_blocks=1)
    run = b"".join(span.chunk_hash for span in database.process_tokens(TOKENS[:tokens]))
    kvbm.process_kvc_events(worker, [Insert(ObjectFact(0, CHAIN_ROOT, run), tier)])


def ask(request_id: str = "r", **changes: object) -> RouteQuestion:
    facts: dict[str, object] = {
        "request_id": request_id,
        "prompt_tokens": len(TOKENS),
        "prefix": PrefixRequest(token_ids=TOKENS),
    }
    return RouteQuestion(**(facts | changes))  # type: ignore[arg-type]


def send(router: Router, question: RouteQuestion, now: float = 0.0) -> RouteDecision:
    decision = router.decide(question, WORKERS, now)
    assert decision is not None
    router.begin(question, decision, now)
    return decision


def test_the_worker_that_has_most_of_the_prompt_gets_it_and_it_is_said_why() -> None:
    kvbm = cluster(*WORKERS)
    hold(kvbm, "b", 200)
    decision = Router(kvbm).decide(ask(), WORKERS, 0.0)
    assert decision is not None
    assert (decision.worker_id, decision.reason, decision.expected_tokens) == ("b", "Balanced", 200)
    assert decision.costs["a"].compute_seconds == pytest.approx(0.4)
    assert decision.costs["b"].compute_seconds == pytest.approx(0.2)


def test_measured_speeds_decide_between_tiers() -> None:
    kvbm = cluster(*WORKERS)
    hold(kvbm, "a", 200)
    hold(kvbm, "b", 300, "CPUMemory")
    hold(kvbm, "c", 400, "LocalNVMe")  # a second per token
    decision = Router(kvbm).decide(ask(), WORKERS, 0.0)
    assert decision is not None
    assert decision.worker_id == "b"


def test_a_worker_that_takes_no_requests_is_not_chosen_and_nobody_is_no_decision() -> None:
    kvbm = cluster(*WORKERS)
    hold(kvbm, "b", 400)
    router = Router(kvbm)
    decision = router.decide(ask(), ("a", "c"), 0.0)
    assert decision is not None
    assert decision.worker_id in {"a", "c"}
    assert router.decide(ask(), (), 0.0) is None


def test_eight_equal_cold_prompts_at_once_go_to_one_worker() -> None:
    router = Router(cluster(*WORKERS), seed=1)
    chosen = [send(router, ask(str(number))) for number in range(8)]
    assert len({decision.worker_id for decision in chosen}) == 1
    assert [decision.predicted_tokens for decision in chosen] == [0, *[400] * 7]


def test_what_failed_before_it_was_computed_is_not_expected() -> None:
    router = Router(cluster(*WORKERS), seed=1)
    send(router, ask("r"))
    router.end("r", 0.0, is_computed=False)
    assert send(router, ask("s")).predicted_tokens == 0


def test_without_tokens_only_load_counts() -> None:
    router = Router(cluster(*WORKERS), seed=1)
    for number in range(9):
        send(router, ask(str(number), prefix=None))
    counts = Counter(router.loads.load(worker).requests for worker in WORKERS)
    assert counts == {3: 3}


def test_a_session_stays_where_it_was_softly_hard_or_not_at_all() -> None:
    for mode, stays in (("hard", True), ("soft", False), ("off", False)):
        kvbm = cluster(*WORKERS)
        router = Router(kvbm, affinity=AffinitySettings(mode=mode), seed=1)  # type: ignore[arg-type]
        first = send(router, ask("r", session_id="s")).worker_id
        router.end("r", 0.0, is_computed=True)
        router.sessions.remember("s", "a" if first != "a" else "b", 0.0)
        elsewhere = router.sessions.worker("s", 0.0)
        hold(kvbm, first, 400)
        decision = router.decide(ask("t", session_id="s"), WORKERS, 10.0)
        assert decision is not None
        assert decision.worker_id == (elsewhere if stays else first)


def test_a_session_is_forgotten_after_its_time_and_with_its_worker() -> None:
    router = Router(cluster(*WORKERS), affinity=AffinitySettings(ttl_seconds=5.0, max_sessions=2))
    router.sessions.remember("s", "a", 0.0)
    assert router.sessions.worker("s", 5.0) == "a"
    assert router.sessions.worker("s", 5.1) is None
    for number in range(3):
        router.sessions.remember(str(number), "a", 0.0)
    assert len(router.sessions) == 2
    router.forget_worker("a")
    assert len(router.sessions) == 0


def test_a_request_may_name_a_policy_of_its_own() -> None:
    router = Router(cluster(*WORKERS))
    chosen = [router.decide(ask(policy="RoundRobin"), WORKERS, 0.0) for _ in range(3)]
    assert [decision.worker_id for decision in chosen if decision] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="policy: found"):
        router.decide(ask(policy="best"), WORKERS, 0.0)


def test_after_a_worker_has_left_and_another_came_nothing_of_it_is_left() -> None:
    kvbm = cluster(*WORKERS)
    router = Router(kvbm, policy="MaxPrefix", seed=1)
    gone = send(router, ask("r")).worker_id
    router.forget_worker(gone)
    kvbm.remove_worker(gone)
    kvbm.join(InstanceDescription(instance_id="new", incarnation=1, model="m", block_tokens=BLOCK))
    decision = router.decide(ask("t"), ["new"], 0.0)
    assert decision is not None
    assert decision.expected_tokens == 0
    router.end("r", 0.0, is_computed=True)
