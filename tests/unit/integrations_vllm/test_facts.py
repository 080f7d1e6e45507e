"""What of vLLM's configuration decides whether, and with whom, a cache can be shared."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.facts import GroupFacts, engine_metadata, group_facts
from opal_connector.integrations.vllm.messages import OpalStepResults, WorkerFacts
from opal_connector.transfers import FailureKind, JobResult

pytestmark = pytest.mark.vllm

FIELDS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**FIELDS)
WORKER = WorkerFacts(
    rank=0,
    block_count=10,
    row_bytes=4096,
    tier_bytes={"CPUMemory": 100},
    kv_layout="LBHNC",
    attention_backend="CPU_ATTN",
    cpu_isa="vec",
)
GROUP = GroupFacts(block_tokens=16, page_bytes={"l": 1024}, kind="full_attention", is_eagle=False)


def vllm_config(model: str = "org/model", **changes: Any) -> Any:
    """The parts of a VllmConfig that are looked at."""
    values: dict[str, Any] = {
        "cache_dtype": "auto",
        "dtype": torch.bfloat16,
        "quantization": None,
        "revision": None,
        "dcp": 1,
        "pcp": 1,
        "tp": 1,
        "pp": 1,
        **changes,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=values["revision"],
            dtype=values["dtype"],
            quantization=values["quantization"],
        ),
        cache_config=SimpleNamespace(cache_dtype=values["cache_dtype"]),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=values["dcp"],
            prefill_context_parallel_size=values["pcp"],
            tensor_parallel_size=values["tp"],
            pipeline_parallel_size=values["pp"],
        ),
    )


def kv_config(*specs: KVCacheSpec) -> KVCacheConfig:
    """One kv group per spec."""
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"g{index}.a", f"g{index}.b"], spec)
            for index, spec in enumerate(specs)
        ],
    )


# Which models are served.


@pytest.mark.parametrize(
    "spec",
    [FULL, MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype=torch.bfloat16)],
    ids=["full", "mla"],
)
def test_full_attention_is_served(spec: KVCacheSpec) -> None:
    """Every block depends on its own prefix only."""
    facts = group_facts(vllm_config(), kv_config(spec))

    assert facts == GroupFacts(
        block_tokens=16,
        page_bytes=dict.fromkeys(["g0.a", "g0.b"], spec.page_size_bytes),
        kind="full_attention",
        is_eagle=False,
    )


def test_layers_of_other_sizes_have_their_own_page_bytes() -> None:
    """A group of uniform type: every layer is asked for itself."""
    wide = FullAttentionSpec(**{**FIELDS, "head_size": 16})
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"g0.a": FULL, "g0.b": wide})

    facts = group_facts(vllm_config(), kv_config(spec))

    assert isinstance(facts, GroupFacts)
    assert facts.page_bytes == {"g0.a": FULL.page_size_bytes, "g0.b": wide.page_size_bytes}


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (vllm_config(), kv_config(), "no KV cache"),
        (vllm_config(), kv_config(FULL, FULL), "2 KV cache groups"),
        (
            vllm_config(),
            kv_config(SlidingWindowSpec(**FIELDS, sliding_window=64)),
            "SlidingWindowSpec",
        ),
        (
            vllm_config(),
            kv_config(MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))),
            "MambaSpec",
        ),
        (
            vllm_config(),
            kv_config(SinkFullAttentionSpec(**FIELDS, sink_len=4)),
            "SinkFullAttentionSpec",
        ),
        (
            vllm_config(),
            kv_config(FullAttentionSpec(**FIELDS, non_causal=True)),
            "not causal",
        ),
        (
            vllm_config(),
            kv_config(
                UniformTypeKVCacheSpecs(
                    block_size=16,
                    kv_cache_specs={
                        "g0.a": FULL,
                        "g0.b": FullAttentionSpec(**FIELDS, non_causal=True),
                    },
                )
            ),
            "not causal",
        ),
        (vllm_config(dcp=2), kv_config(FULL), "context parallelism"),
        (vllm_config(pcp=2), kv_config(FULL), "context parallelism"),
    ],
    ids=["none", "two", "window", "mamba", "sink", "prefix-lm", "partly", "dcp", "pcp"],
)
def test_model_that_cannot_be_served_is_refused_in_one_sentence(
    config: Any, groups: KVCacheConfig, reason: str
) -> None:
    """Where a prefix does not decide its own KV, or a block is not whole: off, and why."""
    answer = group_facts(config, groups)

    assert isinstance(answer, str)
    assert reason in answer


# Which engines share.


def namespace(
    model: str, *, workers: list[WorkerFacts] | None = None, chunk_blocks: int = 4, **changes: Any
) -> bytes:
    """The namespace of an engine."""
    weights_id = changes.pop("weights_id", None)
    return engine_metadata(
        vllm_config(model, **changes),
        GROUP,
        workers or [WORKER],
        OpalConfig(weights_id=weights_id),
        chunk_blocks,
    ).namespace


def replace(**changes: Any) -> list[WorkerFacts]:
    return [msgspec.structs.replace(WORKER, **changes)]


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_dtype": "fp8_e4m3"},
        {"dtype": torch.float16},
        {"quantization": "awq"},
        {"tp": 2},
        {"pp": 2},
        {"chunk_blocks": 8},
        {"revision": "other"},
        {"weights_id": "mine"},
        {"workers": replace(attention_backend="FLASH")},
        {"workers": replace(cpu_isa="amx")},
        {"workers": replace(kv_layout="BLHNC")},
        {"workers": replace(row_bytes=8192)},
        {"workers": [WORKER, WORKER]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_ht_18_every_difference_of_engines_is_another_namespace(changes: dict[str, Any]) -> None:
    """fp8 against bf16, another instruction set, another layout: zero hits."""
    assert namespace("org/model", **changes) != namespace("org/model")


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"), [("auto", torch.bfloat16), ("bfloat16", torch.bfloat16)]
)
def test_auto_is_what_it_stands_for(cache_dtype: str, dtype: torch.dtype) -> None:
    """Saying the default aloud does not lose the cache."""
    assert namespace("org/model", cache_dtype=cache_dtype, dtype=dtype) == namespace("org/model")


def test_capacity_and_place_are_no_identity() -> None:
    """More memory, more blocks or another rank number leave the cache what it is."""
    workers = replace(block_count=99, tier_bytes={"CPUMemory": 1})

    assert namespace("org/model", workers=workers) == namespace("org/model")


def test_ht_19_weights_decide_and_not_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories: equal bytes share, one changed byte does not."""
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    for name, content in (("a", b"x"), ("b", b"x"), ("c", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(content)
    a, b, c = (namespace(str(tmp_path / name)) for name in ("a", "b", "c"))

    assert a == b
    assert a != c


def test_configured_weights_id_is_taken_at_its_word() -> None:
    """Whoever knows better says so; the model's place is then not looked at."""
    assert namespace("org/a", weights_id="mine") == namespace("org/b", weights_id="mine")


# Messages.


def test_results_of_all_ranks_are_joined() -> None:
    """One entry per job and rank, and the messages survive the way between processes."""
    one = OpalStepResults([JobResult(1, 0, {2: FailureKind.IO}, {0: (10, 0.5)})])
    other = OpalStepResults([JobResult(1, 1)])

    joined = pickle.loads(pickle.dumps(one)).aggregate(pickle.loads(pickle.dumps(other)))

    assert isinstance(joined, OpalStepResults)
    assert joined.results == [*one.results, *other.results]
    assert len(one.results) == 1
