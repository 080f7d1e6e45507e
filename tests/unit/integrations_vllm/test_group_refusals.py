"""Which models are not served, in one sentence, and whether vLLM's hybrid manager is on."""

from typing import Any

import pytest

pytest.importorskip("vllm")
from kv_models import (
    CHUNK,
    FIELDS,
    MODELS,
    WINDOW,
    by_hand,
    full,
    grouped,
    mamba,
    vllm_config,
    window,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from opal_connector.integrations.vllm.groups import ServedGroups, served_groups
from opal_connector.integrations.vllm.hybrid_manager import hybrid_manager_warning

pytestmark = pytest.mark.vllm


def served(config: KVCacheConfig, **changes: Any) -> ServedGroups:
    """What is served of a model that is served."""
    answer = served_groups(vllm_config(**changes), config)
    assert isinstance(answer, ServedGroups), answer
    return answer


def refusal(config: KVCacheConfig, **changes: Any) -> str:
    """Why a model is not served."""
    answer = served_groups(vllm_config(**changes), config)
    assert isinstance(answer, str)
    return answer


# Refusals.


class OddAttentionSpec(FullAttentionSpec):
    """Of a model that vLLM was taught by a plugin."""


class OddSpec(KVCacheSpec):
    """Of no kind that is known."""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SinkFullAttentionSpec(**FIELDS, sink_len=4), "sink attention"),
        (CrossAttentionSpec(**FIELDS), "encoder-decoder"),
        (EncoderOnlyAttentionSpec(**FIELDS), "encoder"),
        (RSWASpec(**FIELDS, rswa_window=8), "its blocks are not those of FullAttentionSpec"),
        (HiddenStateCacheSpec(**FIELDS), "its blocks are not those of MLAAttentionSpec"),
        (OddAttentionSpec(**FIELDS), "its blocks are not those of FullAttentionSpec"),
        (OddSpec(block_size=32), "its kind is not known"),
        (full(non_causal=True), "not causal"),
        (MLAAttentionSpec(**FIELDS, non_causal=True), "not causal"),
        (mamba(mamba_cache_mode="none"), 'mamba_cache_mode is "none"'),
        (
            UniformTypeKVCacheSpecs(
                block_size=32, kv_cache_specs={"g1.a": full(), "g1.b": full(non_causal=True)}
            ),
            "not causal",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_kv_group_that_cannot_be_served_is_named(spec: KVCacheSpec, reason: str) -> None:
    """Its number, the name of its spec, and why; the groups that could be served are not."""
    answer = refusal(by_hand(full(), spec))

    name = type(spec).__name__ if not isinstance(spec, UniformTypeKVCacheSpecs) else "FullAttention"
    assert f"kv group 1 ({name}" in answer
    assert reason in answer
    assert "kv group 0" not in answer


def test_all_that_speaks_against_a_model_is_said_at_once() -> None:
    """One sentence, so that nobody mends one fault to hear of the next."""
    config = by_hand(SinkFullAttentionSpec(**FIELDS, sink_len=4), full(), OddSpec(block_size=32))

    answer = refusal(config, dcp=2)

    assert "context parallelism" in answer
    assert "kv group 0 (SinkFullAttentionSpec)" in answer
    assert "kv group 2 (OddSpec)" in answer
    assert "\n" not in answer


def test_what_holds_for_several_kv_groups_is_said_once() -> None:
    """A model of sixty layers of states has as many kv groups."""
    config = by_hand(mamba(), full(), mamba(), mamba(mamba_cache_mode="none"))

    answer = refusal(config, enable_prefix_caching=False)

    assert answer.startswith("kv groups 0, 2, 3 (MambaSpec): prefix caching is off")
    assert answer.count("MambaSpec") == 1


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (by_hand(), {}, "the model has no KV cache"),
        (by_hand(CircularBufferSpec(**FIELDS)), {}, "no kv group of the model can be cached"),
        (by_hand(full()), {"dcp": 2}, "context parallelism"),
        (by_hand(full()), {"pcp": 2}, "context parallelism"),
        (by_hand(full()), {"is_encoder_decoder": True}, "an encoder and a decoder"),
        (by_hand(full(), mamba()), {"enable_prefix_caching": False}, "prefix caching is off"),
        (by_hand(full(), host_resident=True), {}, "a pool of their own"),
        (by_hand(full(), role=KVCacheGroupRole.HISPARSE_SOURCE), {}, "a pool of their own"),
    ],
    ids=["none", "scratch", "dcp", "pcp", "encoder", "no-prefix-cache", "host", "role"],
)
def test_model_that_cannot_be_served_is_refused(
    config: KVCacheConfig, changes: dict[str, Any], reason: str
) -> None:
    """Where a prefix does not decide its own KV, or a block is not whole: off, and why."""
    assert reason in refusal(config, **changes)


def test_attention_needs_no_prefix_caching_of_vllm() -> None:
    """Blocks of attention are complete wherever they end; only states need vLLM's help."""
    assert served(by_hand(full(), window()), enable_prefix_caching=False).layout.groups


# Whether the hybrid memory manager is on.


@pytest.mark.parametrize("model", ["gemma3", "gpt_oss", "llama4"])
def test_manager_that_is_off_is_said_aloud(model: str) -> None:
    """VLLM makes one group of full attention of such a model, which costs memory and transfers."""
    assert hybrid_manager_warning(vllm_config(), grouped(MODELS[model])) is None
    config = grouped(MODELS[model], hybrid_manager=False)
    assert len(config.kv_cache_groups) == 1

    warning = hybrid_manager_warning(vllm_config(hybrid_manager=False), config)

    assert warning is not None
    span = CHUNK if model == "llama4" else WINDOW
    assert f"{span} tokens" in warning
    assert served(config).is_plain, "it is served, and rightly"


@pytest.mark.parametrize(
    ("layer_types", "hybrid_manager", "is_warned"),
    [
        (["sliding_attention", "full_attention"], False, True),
        (["chunked_attention", "full_attention"], False, True),
        (["sliding_attention", "full_attention"], True, False),
        (["full_attention"], False, False),
        (None, False, False),
    ],
)
def test_configuration_of_the_model_is_asked_where_specs_are_silent(
    layer_types: list[str] | None, hybrid_manager: bool, is_warned: bool
) -> None:
    """A window that no spec notes is a loss only if the manager was switched off."""
    config = vllm_config(layer_types=layer_types, hybrid_manager=hybrid_manager)

    assert (hybrid_manager_warning(config, by_hand(full())) is not None) == is_warned


def test_dense_models_and_windows_of_their_own_are_not_warned_of() -> None:
    """Nothing is lost there."""
    for model in ("dense", "mla", "window_only", "mamba"):
        assert hybrid_manager_warning(vllm_config(), grouped(MODELS[model])) is None
