"""Models of every kind of attention: whatever brought the prefix, the answer is the same.

Prompts go one at a time and are compared to the last bit: nothing differs between a computed and a
loaded prefix but who wrote the blocks.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hybrid_models
import pytest
from checks import assert_at_rest
from engine_process import Answer, EngineProcess, opal, running_engine
from prompts import greedy, random_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LAST_TOKEN = 120  # of the printable characters
CHUNK_TOKENS = 256
ANSWER = greedy(6)


class Prompts:
    """What is asked of one kind of model, in lengths that fit its blocks."""

    def __init__(self, kind: str) -> None:
        self.block_tokens = block = hybrid_models.BLOCK_TOKENS[kind]
        self.has_states = kind in hybrid_models.MAMBA_KINDS
        base_tokens = max(300, 2 * block + 44)
        shared_tokens = max(200, block + 12)
        self.base = self.tokens(base_tokens, seed=1)
        shared = self.base[:shared_tokens]
        self.siblings = [
            shared + self.tokens(base_tokens - shared_tokens, seed=2 + one) for one in (0, 1)
        ]
        self.half = self.base[: shared_tokens - 3]
        edges = {2 * block, 3 * hybrid_models.SPAN_TOKENS, CHUNK_TOKENS}
        self.edges = [
            self.tokens(edge + off, seed=10 * edge + off)
            for edge in sorted(edges)
            for off in (-1, 0, 1)
        ]

    def tokens(self, count: int, seed: int) -> list[int]:
        return random_tokens(count, seed=seed, last=LAST_TOKEN)

    def all(self) -> list[list[int]]:
        return [self.base, *self.siblings, self.half, *self.edges]

    def hit_tokens(self, prompt: list[int], *, shared: int | None = None) -> int:
        """What a hit can bring: whole blocks, and not the last token."""
        usable = len(prompt) - 1 if shared is None else shared
        return usable - usable % self.block_tokens


@contextlib.contextmanager
def engine_of(kind: str, **more: Any) -> Iterator[EngineProcess]:
    settings = {"max_model_len": 1024, "num_gpu_blocks_override": 512, **more}
    with running_engine(**{**settings, **hybrid_models.model_settings(kind)}) as engine:
        yield engine


def tiers(directory: Path, **more: Any) -> dict[str, Any]:
    """Memory and a disk, in chunks that are longer than the windows."""
    return opal(
        {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "LocalNVMe": {"path": str(directory), "capacity_GB": "1GiB", "reserve_GB": 0},
            "chunk_size": CHUNK_TOKENS,
            **more,
        }
    )


def assert_equal(kind: str, found: Answer, expected: Answer) -> None:
    """The same tokens with the same probabilities."""
    assert found["tokens"] == expected["tokens"]
    pairs = zip(found["logprobs"], expected["logprobs"], strict=True)
    assert max(abs(one - other) for one, other in pairs) <= hybrid_models.TOLERANCES[kind]


def expected_answers(kind: str, prompts: Prompts) -> dict[tuple[int, ...], Answer]:
    """Every prompt's answer without Opal and without anything cached."""
    answers = {}
    with engine_of(kind) as engine:
        for prompt in prompts.all():
            answers[tuple(prompt)] = engine.ask(prompt, sampling=ANSWER)
            engine.reset_device()
    return answers


@pytest.mark.parametrize("kind", hybrid_models.KINDS)
def test_every_way_to_a_prefix(kind: str, tmp_path: Path) -> None:
    """Cold, device, tier, both, a sibling's prefix, ends of blocks, windows and chunks, a restart.

    Then a memory that is too small for them, over the disk.
    """
    prompts = Prompts(kind)
    expected = expected_answers(kind, prompts)

    def check(answer: Answer, prompt: list[int], *, cached: int | None, loaded: int | None) -> None:
        assert_equal(kind, answer, expected[tuple(prompt)])
        if cached is not None:
            assert answer["cached_tokens"] == cached
        if loaded is not None:
            assert sum(answer["opal"]["hit_tokens"].values()) == loaded

    with engine_of(kind, kv_transfer_config=tiers(tmp_path)) as engine:
        assert len(engine.call("kv_groups")) == sum(
            group.count for group in hybrid_models.expected_groups(kind)
        ), "the hybrid memory manager is off"
        ask_every_way(engine, prompts, check)
        assert_at_rest(engine)

    with engine_of(
        kind,
        kv_transfer_config=tiers(tmp_path, CPUMemory={"capacity_GB": "1MiB"}),
    ) as engine:
        answer = engine.ask(prompts.base, sampling=ANSWER)
        whole = prompts.hit_tokens(prompts.base)
        check(answer, prompts.base, cached=whole, loaded=whole)
        assert answer["opal"]["hit_tokens"] == {"LocalNVMe": whole}
        for prompt in [*prompts.all(), prompts.base]:
            engine.reset_device()
            check(engine.ask(prompt, sampling=ANSWER), prompt, cached=None, loaded=None)
        books = assert_at_rest(engine)
        assert books["used_bytes"] <= books["capacity_bytes"]


def ask_every_way(engine: EngineProcess, prompts: Prompts, check: Any) -> None:
    """The base prompt and what is like it, with everything that can be cached of it somewhere."""
    base, whole = prompts.base, prompts.hit_tokens(prompts.base)
    check(engine.ask(base, sampling=ANSWER), base, cached=0, loaded=0)
    has_device = engine.call("has_prefix_caching")
    check(engine.ask(base, sampling=ANSWER), base, cached=whole, loaded=0 if has_device else whole)
    engine.reset_device()
    check(engine.ask(base, sampling=ANSWER), base, cached=whole, loaded=whole)

    engine.reset_device()
    engine.ask(prompts.half, sampling=ANSWER)
    rest = whole - (prompts.hit_tokens(prompts.half) if has_device else 0)
    known = None if prompts.has_states else rest  # states are where vLLM put them
    check(engine.ask(base, sampling=ANSWER), base, cached=whole, loaded=known)

    for prompt in prompts.siblings:
        engine.reset_device()
        shared = prompts.hit_tokens(prompt, shared=max(200, prompts.block_tokens + 12))
        known = None if prompts.has_states else shared
        check(engine.ask(prompt, sampling=ANSWER), prompt, cached=known, loaded=known)

    for prompt in prompts.edges:
        engine.reset_device()
        check(engine.ask(prompt, sampling=ANSWER), prompt, cached=0, loaded=0)
        engine.reset_device()
        known = prompts.hit_tokens(prompt)
        check(engine.ask(prompt, sampling=ANSWER), prompt, cached=known, loaded=known)
