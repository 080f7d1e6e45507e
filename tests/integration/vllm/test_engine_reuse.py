"""What is stored is found again, to the block, and the answers are those of vLLM alone."""

from collections.abc import Iterator

import pytest
from checks import assert_at_rest, assert_same
from engine_process import EngineProcess, opal, running_engine
from prompts import greedy, random_tokens, request
from reference import Reference

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def warm_engine() -> Iterator[EngineProcess]:
    """Opal with its default settings: chunks of 256 tokens and their tails."""
    with running_engine(kv_transfer_config=opal()) as engine:
        yield engine


@pytest.fixture
def engine(warm_engine: EngineProcess) -> Iterator[EngineProcess]:
    """The engine with empty caches; afterwards nothing of the test may be left in motion."""
    assert warm_engine.call("reset_tiers")
    yield warm_engine
    assert_at_rest(warm_engine)


def test_warm_answer_comes_from_the_tier(engine: EngineProcess, reference: Reference) -> None:
    """Cold, from the device's own cache, from the tier: one answer, which says from where."""
    tokens = random_tokens(1000, seed=1)
    expected = reference.answer(tokens, sampling=greedy(40))

    cold = engine.ask(tokens, sampling=greedy(40))
    device = engine.ask(tokens, sampling=greedy(40))
    engine.reset_device()
    warm = engine.ask(tokens, sampling=greedy(40))

    assert_same([cold, device, warm], [expected] * 3)
    assert [answer["cached_tokens"] for answer in (cold, device, warm)] == [0, 992, 992]
    # 1000 + 40 tokens less the last one, whose KV was never computed: 32 blocks.
    assert cold["opal"] == {"hit_tokens": {}, "stored_tokens": 1024}
    assert device["opal"]["hit_tokens"] == {}
    assert warm["opal"] == {"hit_tokens": {"CPUMemory": 992}, "stored_tokens": 1024}


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_tokens"),
    [
        (5, 0),
        (31, 0),
        (32, 0),  # the last token is always computed, so its block is
        (33, 32),
        (64, 32),
        (255, 224),
        (256, 224),
        (257, 256),
        (288, 256),
        (512, 480),
        (513, 512),
    ],
)
def test_whole_prompt_hits_all_but_its_last_token(
    engine: EngineProcess, reference: Reference, prompt_tokens: int, hit_tokens: int
) -> None:
    """Around the sizes of blocks and chunks, and below one block."""
    tokens = random_tokens(prompt_tokens, seed=prompt_tokens)
    expected = reference.answer(tokens)

    cold = engine.ask(tokens)
    engine.reset_device()
    warm = engine.ask(tokens)

    assert_same([cold, warm], [expected] * 2)
    assert warm["cached_tokens"] == hit_tokens


def test_answer_of_a_short_prompt_is_stored(engine: EngineProcess, reference: Reference) -> None:
    """A prompt below one block becomes a hit as its answer grows past it."""
    tokens = random_tokens(5, seed=2)
    answer = engine.ask(tokens, sampling=greedy(60))
    assert answer["opal"]["stored_tokens"] == 64

    engine.reset_device()
    longer = tokens + answer["tokens"] + random_tokens(9, seed=3)
    warm = engine.ask(longer)

    assert warm["cached_tokens"] == 64
    assert_same([warm], [reference.answer(longer)])


@pytest.mark.parametrize("shared_tokens", [700, 704, 512, 520, 250, 30])
def test_shared_prefix_hits_to_the_block(
    engine: EngineProcess, reference: Reference, shared_tokens: int
) -> None:
    """Other tails after one prefix, which may end anywhere on the grid of chunks and blocks."""
    shared = random_tokens(shared_tokens, seed=shared_tokens)
    first = shared + random_tokens(300, seed=4)
    second = shared + random_tokens(300, seed=5)

    engine.ask(first)
    engine.reset_device()
    warm = engine.ask(second)

    assert warm["cached_tokens"] == shared_tokens // 32 * 32
    assert_same([warm], [reference.answer(second)])


def test_device_hit_is_continued_by_the_tier(engine: EngineProcess, reference: Reference) -> None:
    """The device holds the start of a chunk, the tier the rest of it: only the rest is loaded."""
    tokens = random_tokens(900, seed=6)
    engine.ask(tokens)
    engine.reset_device()
    engine.ask(tokens[:350])  # leaves 10 blocks on the device, 2 of them in the second chunk

    warm = engine.ask(tokens)

    assert warm["cached_tokens"] == 896
    assert warm["opal"]["hit_tokens"] == {"CPUMemory": 896 - 320}
    assert_same([warm], [reference.answer(tokens)])


def test_a_salt_keeps_tenants_apart(engine: EngineProcess, reference: Reference) -> None:
    """Equal tokens under another salt, or under none, hit nothing; under the same salt they do."""
    tokens = random_tokens(600, seed=7)
    cached: dict[str, int] = {}
    for name, more in {
        "a": {"salt": "a"},
        "b": {"salt": "b"},
        "none": {},
        "a again": {"salt": "a"},
        "none again": {},
    }.items():
        answer = engine.ask(tokens, **more)
        assert_same([answer], [reference.answer(tokens)])
        cached[name] = answer["cached_tokens"]
        engine.reset_device()

    assert cached == {"a": 0, "b": 0, "none": 0, "a again": 576, "none again": 576}


def test_parallel_samples(engine: EngineProcess, reference: Reference) -> None:
    """Three sampled answers to one prompt: the same ones, although the prefix is loaded."""
    tokens = random_tokens(500, seed=8)
    sampling = {"n": 3, "temperature": 0.9, "seed": 11, "max_tokens": 30}
    expected = reference.answer(tokens, sampling=sampling)["all_tokens"]
    assert len({tuple(one) for one in expected}) == 3

    cold = engine.ask(tokens, sampling=sampling)
    engine.reset_device()
    warm = engine.ask(tokens, sampling=sampling)

    assert cold["all_tokens"] == expected
    assert warm["all_tokens"] == expected
    assert warm["cached_tokens"] == 480


def test_prompt_logprobs_are_computed_and_stored(
    engine: EngineProcess, reference: Reference
) -> None:
    """Such a request may read no cache, since every logit is wanted; its blocks serve the next."""
    tokens = random_tokens(600, seed=9)
    sampling = {"prompt_logprobs": 1}
    first = engine.ask(tokens, sampling=sampling)
    engine.reset_device()
    second = engine.ask(tokens, sampling=sampling)
    engine.reset_device()
    plain = engine.ask(tokens)

    assert [one["has_prompt_logprobs"] for one in (first, second, plain)] == [True, True, False]
    assert [one["cached_tokens"] for one in (first, second, plain)] == [0, 0, 576]
    assert_same([first, second, plain], [reference.answer(tokens)] * 3)


def test_one_prefix_many_at_once(engine: EngineProcess, reference: Reference) -> None:
    """Eight requests over one prefix in one batch: each loads or shares, all answer right."""
    shared = random_tokens(620, seed=10)
    requests = [request(shared + random_tokens(40, seed=20 + one)) for one in range(8)]
    expected = reference.answers(requests)

    cold = engine.generate(requests)
    engine.reset_device()
    warm = engine.generate(requests)

    assert_same(cold, expected)
    assert_same(warm, expected)
    assert all(answer["cached_tokens"] >= 608 for answer in warm)
    # The prefix was brought once, the others took it from the device.
    assert sum(answer["opal"]["hit_tokens"].get("CPUMemory", 0) for answer in warm) < 2 * 660


def test_external_reset_empties_the_tier(engine: EngineProcess, reference: Reference) -> None:
    """After it nothing hits, nothing is used, and the next request is stored afresh."""
    tokens = random_tokens(800, seed=12)
    engine.ask(tokens)
    assert engine.books()["used_bytes"] > 0

    assert engine.call("reset_tiers")

    assert engine.books()["used_bytes"] == 0
    again = engine.ask(tokens)
    assert again["cached_tokens"] == 0
    engine.reset_device()
    assert engine.ask(tokens)["cached_tokens"] == 768
    assert_same([again], [reference.answer(tokens)])


def test_counters_tell_the_same_story(engine: EngineProcess) -> None:
    """Metrics of vLLM and Opal's agree with the answers."""
    before = engine.metrics()
    tokens = random_tokens(1000, seed=13)
    engine.ask(tokens)
    engine.reset_device()
    engine.ask(tokens)
    after = engine.metrics()

    def grown(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    row_bytes = engine.books()["row_bytes"]
    assert grown("vllm:opal_hit_tokens_total", tier="CPUMemory") == 992
    assert grown("vllm:opal_miss_tokens_total", tier="CPUMemory") == 1000 + 8
    assert grown("vllm:opal_store_bytes_total", tier="CPUMemory") == 31 * row_bytes
    assert grown("vllm:opal_load_bytes_total", tier="CPUMemory") == 31 * row_bytes
    assert 0 < grown("vllm:opal_load_seconds_total", tier="CPUMemory") < 10
    assert grown("vllm:prompt_tokens_cached_by_source_total", source="host") == 992
    assert grown("vllm:prompt_tokens_cached_by_source_total", source="device") == 0
