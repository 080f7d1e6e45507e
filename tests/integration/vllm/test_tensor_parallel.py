"""Two real ranks: each stores its heads, and latents that both have are stored once."""

from pathlib import Path
from typing import Any

import hybrid_models
import pytest
from checks import assert_at_rest
from engine_process import EngineProcess, opal, running_engine
from prompts import greedy, random_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [random_tokens(290, seed=seed, last=120) for seed in (1, 2)]
HIT_TOKENS = 288
ANSWER = greedy(6)
# A computed prefix differs from a loaded one by the rounding of MLA's two ways to compute it.
TOLERANCES = {"qwen3": 0.0, "deepseek-v2": 1e-4}
OBJECTS = 2  # of a prompt: a whole chunk and what is left
COPIES = {"qwen3": 2, "deepseek-v2": 1}


def ask(
    engine: EngineProcess, kind: str, prompt: list[int], expected: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A prompt's answer, which is the expected one."""
    answer = engine.ask(prompt, sampling=ANSWER)
    if expected is not None:
        assert answer["tokens"] == expected["tokens"]
        pairs = zip(answer["logprobs"], expected["logprobs"], strict=True)
        assert max(abs(one - other) for one, other in pairs) <= TOLERANCES[kind]
    return answer


@pytest.mark.parametrize("kind", COPIES)
def test_ranks_store_and_load_together(kind: str, tmp_path: Path) -> None:
    """Memory and, after a restart, either of two directories give a prefix back to both ranks."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    settings = {
        **hybrid_models.model_settings(kind),
        "tensor_parallel_size": 2,
        "max_model_len": 1024,
        "kv_transfer_config": opal(
            {
                "kvc_tiers": ["CPUMemory", "LocalNVMe", "DistributedFS"],
                "LocalNVMe": {"path": str(own), "capacity_GB": "1GiB", "reserve_GB": 0},
                "DistributedFS": {"path": str(shared), "capacity_GB": "1GiB"},
            }
        ),
    }
    with running_engine(**settings) as engine:
        expected = [ask(engine, kind, PROMPTS[0])]
        of_first = list(own.rglob("*.opal"))
        expected.append(ask(engine, kind, PROMPTS[1]))
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert answer["cached_tokens"] == 0
            engine.reset_device()
            warm = ask(engine, kind, prompt, answer)
            assert warm["opal"]["hit_tokens"] == {"CPUMemory": HIT_TOKENS}
        assert_at_rest(engine)
    for directory in (own, shared):
        assert len(list(directory.rglob("*.opal"))) == 2 * OBJECTS * COPIES[kind]
    assert len(of_first) == OBJECTS * COPIES[kind]
    for path in of_first:
        path.unlink()

    with running_engine(**settings) as engine:
        for prompt, answer, tier in zip(
            PROMPTS, expected, ("DistributedFS", "LocalNVMe"), strict=True
        ):
            warm = ask(engine, kind, prompt, answer)
            assert warm["opal"]["hit_tokens"] == {tier: HIT_TOKENS}
        assert_at_rest(engine)
