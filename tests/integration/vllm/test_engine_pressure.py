"""Too little room: in the tier, on the device, in a step. Slower maybe, never wrong."""

import random

import pytest
from checks import assert_at_rest, assert_same
from engine_process import opal, running_engine
from prompts import greedy, random_tokens, request
from reference import Reference

from opal_connector.cli.models import ensure_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK_BYTES = 8 * 196608  # 256 tokens of the model with four layers


@pytest.mark.parametrize("chunk_tokens", [256, 32])
def test_eviction_pressure(reference: Reference, chunk_tokens: int) -> None:
    """A tier of four chunks, eight requests at once over four prefixes, several rounds.

    Also the event stream, replayed, gives exactly what the tier holds.
    """
    prefixes = [random_tokens(300 + 60 * one, seed=100 + one) for one in range(4)]
    requests = [
        request(prefixes[one % 4] + random_tokens(40 + 37 * one, seed=200 + one))
        for one in range(8)
    ]
    settings = opal(
        {"chunk_size": chunk_tokens, "CPUMemory": {"capacity_GB": f"{4 * CHUNK_BYTES}B"}}
    )
    shuffle = random.Random(1).shuffle
    hit_tokens = 0
    with running_engine(
        kv_transfer_config=settings,
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    ) as engine:
        for _ in range(5):
            shuffle(requests)
            answers = engine.generate(requests)
            assert_same(answers, reference.answers(requests))
            hit_tokens += sum(
                answer["opal"]["hit_tokens"].get("CPUMemory", 0) for answer in answers
            )
            books = assert_at_rest(engine)
            assert books["used_bytes"] <= books["capacity_bytes"] == 4 * CHUNK_BYTES
            assert engine.call("replayed_blocks") == engine.call("tier_blocks")
            engine.reset_device()
        metrics = engine.metrics()
        counts = engine.call("event_counts")
        assert engine.call("reset_tiers")
        engine.call("settle")
        assert engine.call("replayed_blocks") == set()

    assert metrics.total("vllm:opal_evictions_total", tier="CPUMemory") > 10
    assert metrics.total("vllm:opal_used_bytes", tier="CPUMemory") == books["used_bytes"]
    assert hit_tokens > 0
    assert counts["BlockRemoved"] > 10


def test_small_steps(reference: Reference) -> None:
    """Prefills in pieces of 80 tokens, which end inside blocks, alone and interleaved."""
    shared = random_tokens(450, seed=30)
    requests = [request(shared + random_tokens(70 * one, seed=31 + one)) for one in range(5)]
    with running_engine(kv_transfer_config=opal(), max_num_batched_tokens=80) as engine:
        rounds = []
        for _ in range(2):
            rounds += [engine.generate(requests), [engine.ask(requests[4]["tokens"])]]
            engine.reset_device()
        assert_at_rest(engine)

    expected = reference.answers(requests)
    assert_same(rounds[0], expected)
    assert_same(rounds[1], expected[4:])
    assert_same(rounds[2], expected)
    assert [answer["cached_tokens"] for answer in rounds[2]] == [448, 512, 576, 640, 704]


def test_preemptions(reference: Reference) -> None:
    """A device that is too small for all: who was preempted comes back with what the tier has."""
    model = ensure_tiny_llama()
    crowd = [
        request(random_tokens(150 + 10 * one, seed=40 + one, last=255), sampling=greedy(300))
        for one in range(6)
    ]
    with running_engine(
        model=model,
        kv_transfer_config=opal(),
        max_model_len=1024,
        num_gpu_blocks_override=40,
    ) as engine:
        for _ in range(2):
            before = engine.metrics()
            answers = engine.generate(crowd)
            after = engine.metrics()
            assert_same(answers, reference.answers(crowd, model=model))
            preemptions, loaded_bytes = (
                after.total(name) - before.total(name)
                for name in ("vllm:num_preemptions_total", "vllm:opal_load_bytes_total")
            )
            assert preemptions > 3
            assert loaded_bytes > 0
            assert_at_rest(engine)
            engine.reset_device()
    assert all(answer["cached_tokens"] >= 128 for answer in answers)


def test_without_vllms_own_prefix_cache(reference: Reference) -> None:
    """`enable_prefix_caching=False`: every hit is the tier's, also within one batch."""
    shared = random_tokens(530, seed=50)
    requests = [request(shared + random_tokens(30, seed=60 + one)) for one in range(4)]
    with running_engine(kv_transfer_config=opal(), enable_prefix_caching=False) as engine:
        cold = engine.ask(shared)
        warm = [engine.ask(shared) for _ in range(2)]
        many = engine.generate(requests)
        assert_at_rest(engine)

    assert_same([cold, *warm], [reference.answer(shared)] * 3)
    assert_same(many, reference.answers(requests))
    assert [answer["cached_tokens"] for answer in [cold, *warm]] == [0, 512, 512]
    assert all(
        answer["cached_tokens"] == answer["opal"]["hit_tokens"]["CPUMemory"] == 512
        for answer in many
    )


@pytest.mark.parametrize(
    ("extra", "chunk_blocks", "whole_hit", "shared_hit"),
    [
        ({"chunk_size": 32}, 1, 992, 672),
        ({"chunk_size": "auto"}, 11, 992, 672),  # 2 MiB are 10.7 blocks of this model
        ({"chunk_size": 256, "save_unfull_chunk": False}, 8, 768, 672),
        ({"chunk_size": 100}, 3, 992, 672),  # rounded to whole blocks, with a warning
        ({"max_kvc_ready_requests": 1}, 8, 992, 672),
    ],
)
def test_variants_of_the_configuration(
    reference: Reference,
    extra: dict[str, object],
    chunk_blocks: int,
    whole_hit: int,
    shared_hit: int,
) -> None:
    """Other chunks, no tails, a narrow gate: the same answers, hits to the block."""
    tokens = random_tokens(1000, seed=70)
    branch = tokens[:700] + random_tokens(200, seed=71)
    crowd = [request(random_tokens(300, seed=80 + one)) for one in range(4)]
    with running_engine(kv_transfer_config=opal(extra)) as engine:
        assert engine.books()["chunk_blocks"] == chunk_blocks
        cold = engine.ask(tokens)
        engine.reset_device()
        warm = engine.ask(tokens)
        engine.reset_device()
        other = engine.ask(branch)
        engine.generate(crowd)
        engine.reset_device()
        many = engine.generate(crowd)
        assert_at_rest(engine)
        has_warning = "chunk_size" in engine.log_text() and "WARNING" in engine.log_text()

    assert_same([cold, warm], [reference.answer(tokens)] * 2)
    assert_same([other], [reference.answer(branch)])
    assert_same(many, reference.answers(crowd))
    assert warm["cached_tokens"] == whole_hit
    assert other["cached_tokens"] == shared_hit
    assert has_warning or extra.get("chunk_size") != 100
