"""Models of several kinds of attention when something breaks: slower maybe, never wrong.

With several kv groups vLLM can only be told which request failed, not which block.
"""

import random
from collections.abc import Iterator

import hybrid_models
import pytest
from checks import assert_at_rest, assert_same
from engine_process import Answer, EngineProcess, opal, running_engine
from prompts import greedy, random_tokens, request

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAST_TOKEN = 120
CHAIN, OTHERS = 0, 1  # attention groups: those that look back on everything come first
KINDS = ("gemma3", "lfm2", "mistral")  # windows, states beside full attention; windows alone


def tokens_of(count: int, seed: int) -> list[int]:
    return random_tokens(count, seed=seed, last=LAST_TOKEN)


def failures(engine: EngineProcess) -> float:
    return engine.metrics().total("vllm:opal_failures_total", kind="checksum")


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def hybrid_engine(kind: str) -> Iterator[EngineProcess]:
    settings = {"max_model_len": 1024, "num_gpu_blocks_override": 256}
    model = {**hybrid_models.model_settings(kind), "dtype": "float32"}
    with running_engine(**settings, kv_transfer_config=opal(), **model) as engine:
        yield engine


@pytest.fixture
def engine(hybrid_engine: EngineProcess) -> Iterator[EngineProcess]:
    """An engine with empty caches and a whole tier."""
    hybrid_engine.call("mend")
    assert hybrid_engine.call("reset_tiers")
    yield hybrid_engine
    hybrid_engine.call("mend")
    hybrid_engine.call("settle")
    assert_at_rest(hybrid_engine)


def test_a_damaged_object_of_any_group_is_recomputed(engine: EngineProcess, kind: str) -> None:
    """After the lookup has promised it: the request computes all, and others hit again.

    What a failed load has not looked at is found to be damaged by the next one.
    """
    groups = [CHAIN] if kind == "mistral" else [CHAIN, OTHERS]
    prompt = tokens_of(300, seed=1)
    cold = engine.ask(prompt, sampling=greedy(6))
    for group in groups:
        before = failures(engine)
        engine.call("damage_group", group=group)
        engine.reset_device()
        answers = []
        for _ in range(4):
            answers.append(engine.ask(prompt, sampling=greedy(6)))
            engine.reset_device()

        assert_same(answers, [cold] * 4)
        assert failures(engine) > before
        assert all(answer["cached_tokens"] == loaded_tokens(answer) for answer in answers)
        assert answers[0]["cached_tokens"] < answers[-1]["cached_tokens"] == 288


def test_a_tier_that_cannot_be_read(engine: EngineProcess) -> None:
    """Several requests at once lose all of their loads: each is computed, none is lost."""
    prompts = [request(tokens_of(200 + 40 * one, seed=20 + one)) for one in range(4)]
    cold = [engine.ask(prompt["tokens"]) for prompt in prompts]
    engine.reset_device()
    engine.call("fail", verb="read")
    broken = [engine.ask(prompt["tokens"]) for prompt in prompts]
    engine.call("mend")
    engine.reset_device()
    healed = [engine.ask(prompt["tokens"]) for prompt in prompts]

    assert_same(broken, cold)
    assert_same(healed, cold)
    assert all(answer["opal"]["hit_tokens"] == {} for answer in broken)
    assert all(answer["cached_tokens"] > 0 for answer in healed)


def test_no_step_computes_with_what_a_load_has_not_brought(engine: EngineProcess) -> None:
    """A request waits outside of the batch until its load has ended.

    vLLM copies a state that it goes on from before a step's loads begin: too early for those.
    """
    prompt = tokens_of(300, seed=15)
    cold = engine.ask(prompt, sampling=greedy(6))
    engine.reset_device()
    engine.call("hold_back", verb="read")
    engine.call("start", request_id="waits", request=request(prompt, sampling=greedy(6)))
    for _ in range(3):
        engine.call("step")
        assert engine.call("status_of", request_id="waits") == "WAITING_FOR_REMOTE_KVS"
    engine.call("let_go")
    engine.call("settle")
    engine.call("mend")
    warm = engine.call("finished", request_id="waits")

    assert_same([warm], [cold])
    assert warm["cached_tokens"] == loaded_tokens(warm) == 288


def test_a_store_that_runs_late_keeps_the_bytes_of_its_step(engine: EngineProcess) -> None:
    """Blocks leave the window, and others need blocks, while they are still being stored."""
    prompt = tokens_of(400, seed=30)
    engine.call("hold_back", verb="write")
    cold = engine.generate([request(prompt, sampling=greedy(40))], settle=False)
    for seed in range(31, 34):
        engine.generate([request(tokens_of(350, seed=seed))], settle=False)
    engine.call("let_go")
    engine.call("settle")
    engine.call("mend")
    engine.reset_device()
    warm = engine.ask(prompt, sampling=greedy(40))

    assert_same([warm], cold)
    assert warm["opal"]["hit_tokens"]["CPUMemory"] == 384


def test_requests_that_leave_early(engine: EngineProcess, kind: str) -> None:
    """Aborted before, during and after their load: whatever they held comes back."""
    prompt = tokens_of(500, seed=40)
    cold = engine.ask(prompt)
    for steps in range(4):
        engine.reset_device()
        engine.call("start", request_id=f"r{steps}", request=request(prompt))
        engine.call("step", count=steps)
        engine.call("abort", request_ids=[f"r{steps}"])
        engine.call("settle")
        assert_at_rest(engine)
    engine.reset_device()
    assert_same([engine.ask(prompt)], [cold])


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_a_crowd_on_a_small_device(kind: str) -> None:
    """Too little of everything: preemptions, evictions and equal prompts at once.

    Not of models with states: what a state is depends on the steps in which it was computed.
    """
    prefixes = [tokens_of(160 + 50 * one, seed=50 + one) for one in range(3)]
    crowd = [
        request(prefixes[one % 3] + tokens_of(20 + 31 * one, seed=60 + one), sampling=greedy(12))
        for one in range(6)
    ]
    model = {**hybrid_models.model_settings(kind), "dtype": "float32", "max_model_len": 1024}
    with running_engine(**model, num_gpu_blocks_override=512) as engine:
        expected = engine.generate(crowd)
    groups = sum(group.count for group in hybrid_models.expected_groups(kind))
    with running_engine(
        **{**model, "max_model_len": 512},
        num_gpu_blocks_override=groups * 16 + 17,
        kv_transfer_config=opal({"CPUMemory": {"capacity_GB": "768KiB"}}),
    ) as engine:
        shuffle = random.Random(1).shuffle
        order = list(range(len(crowd)))
        hit_tokens = 0
        for _ in range(3):
            shuffle(order)
            answers = engine.generate([crowd[one] for one in order])
            assert_same(answers, [expected[one] for one in order])
            hit_tokens += sum(map(loaded_tokens, answers))
            books = assert_at_rest(engine)
            assert books["used_bytes"] <= books["capacity_bytes"]
            engine.reset_device()
        evictions = engine.metrics().total("vllm:opal_evictions_total", tier="CPUMemory")
    assert hit_tokens > 0
    assert evictions > 0


def loaded_tokens(answer: Answer) -> int:
    return sum(answer["opal"]["hit_tokens"].values())


def test_policy_fail_ends_the_request_and_only_it() -> None:
    """With vLLM's default policy a damaged object is an error of its request, not of the engine."""
    prompt, other = tokens_of(300, seed=70), tokens_of(250, seed=71)
    model = {**hybrid_models.model_settings("gemma3"), "max_model_len": 1024}
    with running_engine(**model, kv_transfer_config=opal(kv_load_failure_policy="fail")) as engine:
        cold = engine.ask(prompt)
        engine.call("damage_group", group=OTHERS)
        engine.reset_device()
        failed, served = engine.generate([request(prompt), request(other)])
        answers = []
        for _ in range(6):
            engine.reset_device()
            answers.append(engine.ask(prompt))
        assert_at_rest(engine)

    assert failed["finish_reason"] == "error"
    assert served["finish_reason"] == "length"
    assert answers[-1]["tokens"] == cold["tokens"]
