"""The models of every kind of attention that tests and benchmarks start: where, how, and what of.

Prompts for kinds with Mamba layers must be sent one at a time where answers are compared to the
bit: a state depends on the chunks in which it was computed, and a chunk that shares a step with
another prompt's is cut elsewhere.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_connector.cli.model_library import ensure_named
from opal_connector.cli.tiny_hybrids import TINY_HYBRIDS

MODELS = {model.kind: model for model in TINY_HYBRIDS.values()}
KINDS = tuple(MODELS)
# Those whose kv groups are of one spec; all others have a hybrid coordinator.
DENSE_KINDS = ("qwen3", "deepseek-v2")
MAMBA_KINDS = tuple(kind for kind, model in MODELS.items() if "mamba" in model.kv_groups)
WINDOW_KINDS = tuple(kind for kind, model in MODELS.items() if "sliding_window" in model.kv_groups)
# Largest difference of logprobs between a computed and a loaded prefix.
TOLERANCES = {kind: 1e-3 if kind == "deepseek-v2" else 0.0 for kind in KINDS}
# vLLM's block of every group, which can be longer than the one that is asked for.
BLOCK_TOKENS = {
    **dict.fromkeys(KINDS, 32),
    "granite-h": 128,
    "falcon-h1": 128,
    "nemotron-h": 256,
    "qwen3-next": 160,
    "deepseek-v2": 16,
}
SPAN_TOKENS = 64


@dataclass(frozen=True)
class ExpectedGroup:
    """kv groups of one spec: `count` of them, as vLLM builds them without a connector."""

    kind: str
    block_tokens: int
    span_tokens: int
    count: int


def expected_groups(kind: str) -> list[ExpectedGroup]:
    """What vLLM makes of a model, those that look back on everything first."""
    found = MODELS[kind].kv_groups
    specs = sorted(set(found), key=lambda spec: (not spec.startswith(("full", "mla")), spec))
    return [
        ExpectedGroup(
            spec,
            BLOCK_TOKENS[kind],
            SPAN_TOKENS if spec.startswith(("sliding", "chunked")) else 0,
            found.count(spec),
        )
        for spec in specs
    ]


def ensure_model(kind: str) -> Path:
    """The model's directory, made on the first call and kept in the user's cache."""
    directory, _ = ensure_named(MODELS[kind].name)
    return directory


def model_settings(kind: str) -> dict[str, Any]:
    """What `vllm.LLM` must be told for this kind, its model included."""
    return {"model": str(ensure_model(kind)), **MODELS[kind].settings.keywords()}
