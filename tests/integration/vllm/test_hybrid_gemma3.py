"""The real Gemma 3 270M where it could go wrong: at the ends of things, and with too little room.

Its window is 512 tokens. What brings a prefix must not show, neither in the tokens nor in how
probable they were when nothing was cached.
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
ANSWER = greedy(4)


class Visit(NamedTuple):
    """What the first engine answered to every prompt, cold and then from memory; and its disk."""

    cold: list[Answer]
    warm: list[Answer]
    kv_groups: list[str]
    disk: Path


def gemma3_engine(directory: Path, *, memory: str, disk: str) -> Any:
    """Memory over a disk, in chunks that are shorter than the window and do not divide it."""
    extra = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe"],
        "CPUMemory": {"capacity_GB": memory},
        "LocalNVMe": {"path": str(directory), "capacity_GB": disk, "reserve_GB": 0},
        "chunk_size": CHUNK_TOKENS,
    }
    return running_engine(
        model=ensure_download("gemma3-270m"),
        max_model_len=1024,
        num_gpu_blocks_override=256,
        kv_transfer_config=opal(extra),
    )


def loaded_tokens(answer: Answer) -> int:
    return sum(answer["opal"]["hit_tokens"].values())


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Visit:
    directory = tmp_path_factory.mktemp("disk")
    found = Visit([], [], [], directory)
    with gemma3_engine(directory, memory="256MiB", disk="1GiB") as engine:
        found.kv_groups.extend(engine.call("kv_groups"))
        for prompt in PROMPTS:
            for answers in (found.cold, found.warm):
                answers.append(engine.ask(prompt, sampling=ANSWER))
                engine.reset_device()
        assert_at_rest(engine)
    return found


def test_gemma3_270m_at_the_ends_of_blocks_chunks_and_the_window(visit: Visit) -> None:
    """One below, on and one above: computed, then loaded up to the last block before the end."""
    assert len(visit.kv_groups) == 6, "the hybrid memory manager is off"
    assert [answer["cached_tokens"] for answer in visit.cold] == [0] * len(PROMPTS)
    assert_same(visit.warm, visit.cold)
    whole = [(len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in PROMPTS]
    assert [answer["cached_tokens"] for answer in visit.warm] == whole
    assert list(map(loaded_tokens, visit.warm)) == whole


def test_gemma3_270m_under_eviction_pressure(visit: Visit) -> None:
    """After a restart, with room for half of the files and one prompt in memory: right or a miss.

    Objects of windows and of full attention leave both tiers while others are loaded.
    """
    with gemma3_engine(visit.disk, memory="28MiB", disk="48MiB") as engine:
        hit_tokens = 0
        for place in [*range(len(PROMPTS)), len(PROMPTS) - 1, 0]:
            answer = engine.ask(PROMPTS[place], sampling=ANSWER)
            assert_same([answer], [visit.cold[place]])
            hit_tokens += loaded_tokens(answer)
            engine.reset_device()
        books = assert_at_rest(engine)
        metrics = engine.metrics()
    evictions = {
        tier: metrics.total("vllm:opal_evictions_total", tier=tier)
        for tier in ("CPUMemory", "LocalNVMe")
    }
    assert books["used_bytes"] <= books["capacity_bytes"]
    assert all(evictions.values()), evictions
    assert 0 < hit_tokens < sum(map(len, PROMPTS))
