"""A tier that fails, and requests that leave early: a miss and a counter, never a wrong token."""

from collections.abc import Iterator

import pytest
from checks import assert_at_rest, assert_same
from engine_process import EngineProcess, opal, running_engine
from prompts import greedy, random_tokens, request
from reference import Reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def recomputing_engine() -> Iterator[EngineProcess]:
    with running_engine(kv_transfer_config=opal()) as engine:
        yield engine


@pytest.fixture
def engine(recomputing_engine: EngineProcess) -> Iterator[EngineProcess]:
    """An engine that recomputes what cannot be loaded, with empty caches and a whole tier."""
    recomputing_engine.call("mend")
    assert recomputing_engine.call("reset_tiers")
    yield recomputing_engine
    recomputing_engine.call("mend")
    recomputing_engine.call("settle")
    assert_at_rest(recomputing_engine)


def failures(engine: EngineProcess, kind: str) -> float:
    return engine.metrics().total("vllm:opal_failures_total", kind=kind)


@pytest.mark.parametrize(("damaged", "kept_tokens"), [(0, 0), (20, 512), (30, 768)])
def test_a_damaged_block_is_recomputed(
    engine: EngineProcess, reference: Reference, damaged: int, kept_tokens: int
) -> None:
    """A flipped byte costs its chunk and what follows; the next store makes it good again."""
    tokens = random_tokens(1000, seed=300)
    before = failures(engine, "checksum")
    engine.ask(tokens)
    engine.call("damage_tier", tokens=tokens, blocks=[damaged])
    engine.reset_device()

    answer = engine.ask(tokens)
    engine.reset_device()
    again = engine.ask(tokens)

    assert_same([answer, again], [reference.answer(tokens)] * 2)
    assert answer["opal"]["hit_tokens"] == ({"CPUMemory": kept_tokens} if kept_tokens else {})
    assert failures(engine, "checksum") == before + 1
    assert again["cached_tokens"] == again["opal"]["hit_tokens"]["CPUMemory"] == 992


def test_a_pool_that_is_damaged_everywhere(engine: EngineProcess, reference: Reference) -> None:
    """What is not read is not known to be bad, so each round finds and mends some of it."""
    tokens = random_tokens(1000, seed=301)
    engine.ask(tokens)
    engine.call("damage_tier", tokens=tokens)
    hits = []
    for _ in range(5):
        engine.reset_device()
        answer = engine.ask(tokens)
        assert_same([answer], [reference.answer(tokens)])
        hits.append(answer["opal"]["hit_tokens"].get("CPUMemory", 0))

    assert hits[0] == 0
    assert hits == sorted(hits)
    assert hits[-1] == 992


def test_a_tier_that_raises_on_reading(engine: EngineProcess, reference: Reference) -> None:
    """Every request is served by computing, several at once; healed, the tier serves again."""
    requests = [request(random_tokens(500 + 40 * one, seed=310 + one)) for one in range(6)]
    before = failures(engine, "io")
    engine.generate(requests)
    engine.reset_device()
    engine.call("fail", verb="read")

    broken = engine.generate(requests)
    engine.call("mend")
    engine.reset_device()
    healed = engine.generate(requests)

    assert_same(broken, reference.answers(requests))
    assert_same(healed, reference.answers(requests))
    assert all(answer["opal"]["hit_tokens"] == {} for answer in broken)
    assert all(answer["opal"]["hit_tokens"]["CPUMemory"] >= 480 for answer in healed)
    assert failures(engine, "io") >= before + len(requests)


def test_a_tier_that_raises_once(engine: EngineProcess, reference: Reference) -> None:
    """Objects are tried again one by one, so one hiccup of the medium costs no hit."""
    tokens = random_tokens(700, seed=320)
    engine.ask(tokens)
    engine.reset_device()
    engine.call("fail", verb="read", times=1)

    answer = engine.ask(tokens)

    assert_same([answer], [reference.answer(tokens)])
    assert answer["opal"]["hit_tokens"] == {"CPUMemory": 672}


def test_a_tier_that_raises_on_writing(engine: EngineProcess, reference: Reference) -> None:
    """Nothing is found of what could not be written, and it is written the next time."""
    tokens = random_tokens(700, seed=330)
    engine.call("fail", verb="write")
    first = engine.ask(tokens)
    assert engine.books()["used_bytes"] == 0
    engine.call("mend")
    engine.reset_device()

    second = engine.ask(tokens)
    engine.reset_device()
    third = engine.ask(tokens)

    assert_same([first, second, third], [reference.answer(tokens)] * 3)
    assert [answer["cached_tokens"] for answer in (first, second, third)] == [0, 0, 672]


def test_policy_fail_ends_the_request_and_only_it(reference: Reference) -> None:
    """The default policy of vLLM: the request errs, the engine and its other requests go on."""
    tokens = random_tokens(700, seed=340)
    other = random_tokens(300, seed=341)
    with running_engine(kv_transfer_config=opal(kv_load_failure_policy="fail")) as engine:
        engine.ask(tokens)
        engine.call("damage_tier", tokens=tokens)
        engine.reset_device()
        failed, served = engine.generate([request(tokens), request(other)])
        engine.reset_device()
        again = engine.ask(tokens)
        assert_at_rest(engine)
        has_warning = "kv_load_failure_policy" in engine.log_text()
        counted = failures(engine, "checksum")

    assert failed["finish_reason"] == "error"
    assert failed["tokens"] == []
    assert_same([served, again], [reference.answer(other), reference.answer(tokens)])
    assert has_warning
    assert counted > 0


def test_abort_in_the_middle_of_an_answer(engine: EngineProcess, reference: Reference) -> None:
    """What it had stored serves the next request; everything that it held is given back."""
    tokens = random_tokens(600, seed=350)
    engine.call("start", request_id="gone", request=request(tokens, sampling=greedy(200)))
    while engine.call("output_count", request_id="gone") < 20:
        engine.call("step")
    engine.call("abort", request_ids=["gone"])
    engine.call("settle")
    assert_at_rest(engine)
    engine.reset_device()

    answer = engine.ask(tokens)

    assert answer["cached_tokens"] == 576
    assert_same([answer], [reference.answer(tokens)])


def test_abort_while_storing(engine: EngineProcess, reference: Reference) -> None:
    """The store outlives its request: its blocks stay until the bytes are out of them."""
    tokens = random_tokens(600, seed=360)
    engine.call("hold_back", verb="write")
    engine.call("start", request_id="gone", request=request(tokens, sampling=greedy(200)))
    while engine.call("output_count", request_id="gone") < 3:
        engine.call("step")
    engine.call("abort", request_ids=["gone"])
    engine.call("step", count=3)
    held = engine.books()["held_blocks"]
    # Another request takes blocks meanwhile; it must not get those.
    intruder = engine.generate([request(random_tokens(900, seed=361))], settle=False)
    engine.call("let_go")
    engine.call("settle")
    assert_at_rest(engine)
    engine.reset_device()

    answer = engine.ask(tokens)

    assert held == 18
    assert answer["cached_tokens"] == 576
    assert_same(
        [answer, *intruder],
        [reference.answer(tokens), reference.answer(random_tokens(900, seed=361))],
    )


def test_abort_while_loading(engine: EngineProcess, reference: Reference) -> None:
    """The load ends in blocks that nobody reads; then they, the lease and the job are back."""
    tokens = random_tokens(600, seed=370)
    engine.ask(tokens)
    engine.reset_device()
    engine.call("hold_back", verb="read")
    engine.call("start", request_id="gone", request=request(tokens))
    engine.call("step_until", status="WAITING_FOR_REMOTE_KVS", request_id="gone")
    engine.call("step", count=3)
    assert engine.books()["jobs"] == 1
    engine.call("abort", request_ids=["gone"])
    engine.call("step", count=3)
    assert engine.books()["device_blocks_in_use"] > 0

    engine.call("let_go")
    engine.call("settle")

    assert_at_rest(engine)
    answer = engine.ask(tokens)
    assert answer["opal"]["hit_tokens"] == {"CPUMemory": 576}
    assert_same([answer], [reference.answer(tokens)])


def test_reset_while_loading_and_storing(engine: EngineProcess, reference: Reference) -> None:
    """A store that was under way when the tiers were emptied does not come back afterwards."""
    tokens = random_tokens(600, seed=380)
    engine.call("hold_back", verb="write")
    first = engine.generate([request(tokens)], settle=False)
    engine.call("reset_tiers")  # the device cannot be emptied yet: the store holds its blocks
    engine.call("let_go")
    engine.call("settle")
    assert engine.books()["used_bytes"] == 0
    engine.reset_device()
    second = engine.ask(tokens)
    engine.reset_device()

    engine.call("hold_back", verb="read")
    engine.call("start", request_id="late", request=request(tokens))
    engine.call("step_until", status="WAITING_FOR_REMOTE_KVS", request_id="late")
    engine.call("reset_tiers")
    engine.call("let_go")
    engine.call("settle")
    late = engine.call("finished", request_id="late")
    engine.reset_device()
    last = engine.ask(tokens)

    assert_same([first[0], second, late, last], [reference.answer(tokens)] * 4)
    assert [answer["cached_tokens"] for answer in (first[0], second, late)] == [0, 0, 576]
