"""The real Gemma 3 270M where it could go wrong: at the ends of things, and with too little room.

Its window is 512 tokens. What brings a prefix must not show, neither in the tokens nor in how
probable they are without Opal and with nothing cached.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checks import assert_at_rest, assert_same
from engine_process import BLOCK_TOKENS, Answer, opal, running_engine
from prompts import greedy, random_tokens

from opal_connector.cli.model_library import ensure_download

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOW_TOKENS = 512
CHUNK_TOKENS = 192
# A block, a chunk and the window; a prompt of a window has two chunks and a part of one.
EDGES = (3 * BLOCK_TOKENS, CHUNK_TOKENS, WINDOW_TOKENS)
PROMPTS = [
    random_tokens(edge + off, seed=edge + off, last=200_000) for edge in EDGES for off in (-1, 0, 1)
]
BASE = PROMPTS[-1]
HALF = BASE[:350]
SHARED_TOKENS = 400
SIBLINGS = [BASE[:SHARED_TOKENS] + random_tokens(100, seed=seed, last=200_000) for seed in (1, 2)]
ANSWER = greedy(4)


class Visit(NamedTuple):
    """What the first engine with Opal answered, by what had brought the prefix; and its disk."""

    cold: list[Answer]
    warm: list[Answer]
    siblings: list[Answer]
    device: Answer
    mixed: Answer
    kv_groups: list[str]
    disk: Path


def gemma3_engine(**more: Any) -> Any:
    return running_engine(
        model=ensure_download("gemma3-270m"),
        max_model_len=1024,
        num_gpu_blocks_override=256,
        **more,
    )


def opal_engine(directory: Path, *, memory: str, disk: str) -> Any:
    """Memory over a disk, in chunks that are shorter than the window and do not divide it."""
    extra = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe"],
        "CPUMemory": {"capacity_GB": memory},
        "LocalNVMe": {"path": str(directory), "capacity_GB": disk, "reserve_GB": 0},
        "chunk_size": CHUNK_TOKENS,
    }
    return gemma3_engine(kv_transfer_config=opal(extra))


def whole_tokens(prompt: list[int]) -> int:
    """What a hit can bring: whole blocks, and not the last token."""
    return (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def loaded_tokens(answer: Answer) -> int:
    return sum(answer["opal"]["hit_tokens"].values())


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """The answers to all prompts and then the siblings, without Opal and with nothing cached."""
    answers = []
    with gemma3_engine() as engine:
        for prompt in [*PROMPTS, *SIBLINGS]:
            answers.append(engine.ask(prompt, sampling=ANSWER))
            engine.reset_device()
    return answers


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Visit:
    directory = tmp_path_factory.mktemp("disk")
    with opal_engine(directory, memory="256MiB", disk="1GiB") as engine:

        def ask(prompt: list[int]) -> Answer:
            return engine.ask(prompt, sampling=ANSWER)

        cold, warm = [], []
        for prompt in PROMPTS:
            for answers in (cold, warm):
                engine.reset_device()
                answers.append(ask(prompt))
        device = ask(BASE)
        siblings = []
        for prompt in SIBLINGS:
            engine.reset_device()
            siblings.append(ask(prompt))
        engine.reset_device()
        ask(HALF)
        mixed = ask(BASE)
        kv_groups = engine.call("kv_groups")
        assert_at_rest(engine)
    return Visit(cold, warm, siblings, device, mixed, kv_groups, directory)


def test_gemma3_270m_at_the_ends_of_blocks_chunks_and_the_window(
    visit: Visit, expected: list[Answer]
) -> None:
    """One below, on and one above: computed, then loaded up to the last block before the end."""
    assert len(visit.kv_groups) == 6, "the hybrid memory manager is off"
    assert [answer["cached_tokens"] for answer in visit.cold] == [0] * len(PROMPTS)
    assert_same(visit.cold, expected[: len(PROMPTS)])
    assert_same(visit.warm, expected[: len(PROMPTS)])
    whole = list(map(whole_tokens, PROMPTS))
    assert [answer["cached_tokens"] for answer in visit.warm] == whole
    assert list(map(loaded_tokens, visit.warm)) == whole


def test_gemma3_270m_from_the_device_from_both_and_behind_a_shared_prefix(
    visit: Visit, expected: list[Answer]
) -> None:
    """The device has all, or a half that memory completes, or memory has a sibling's beginning."""
    whole = whole_tokens(BASE)
    answers = [visit.device, visit.mixed, *visit.siblings]
    assert_same(answers, [expected[len(PROMPTS) - 1]] * 2 + expected[len(PROMPTS) :])
    shared = SHARED_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    assert [answer["cached_tokens"] for answer in answers] == [whole, whole, shared, shared]
    loaded = [0, whole - whole_tokens(HALF), shared, shared]
    assert list(map(loaded_tokens, answers)) == loaded


def test_gemma3_270m_under_eviction_pressure(visit: Visit, expected: list[Answer]) -> None:
    """After a restart, with room for half of the files and one prompt in memory: right or a miss.

    Objects of windows and of full attention leave both tiers while others are loaded.
    """
    with opal_engine(visit.disk, memory="28MiB", disk="48MiB") as engine:
        hits = []
        for place in [*reversed(range(len(PROMPTS))), len(PROMPTS) - 1, 0]:
            answer = engine.ask(PROMPTS[place], sampling=ANSWER)
            assert_same([answer], [expected[place]])
            hits.append(answer["opal"]["hit_tokens"])
            engine.reset_device()
        books = assert_at_rest(engine)
        metrics = engine.metrics()
    evictions = {
        tier: metrics.total("vllm:opal_evictions_total", tier=tier)
        for tier in ("CPUMemory", "LocalNVMe")
    }
    assert books["used_bytes"] <= books["capacity_bytes"]
    assert all(evictions.values()), evictions
    assert hits[0].get("LocalNVMe"), "nothing of before the restart was found"
