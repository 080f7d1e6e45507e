"""What of vLLM's configuration decides with whom a cache can be shared."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
import torch

from opal_connector.config import OpalConfig
from opal_connector.integrations.vllm.facts import engine_metadata
from opal_connector.integrations.vllm.messages import OpalStepResults, WorkerFacts
from opal_connector.keys import plain_layout
from opal_connector.transfers import FailureKind, JobResult

pytestmark = pytest.mark.vllm

WORKER = WorkerFacts(
    rank=0,
    block_count=10,
    row_bytes=4096,
    tier_bytes={"CPUMemory": 100},
    kv_layout="LBHNC",
    attention_backend="CPU_ATTN",
    cpu_isa="vec",
)


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


# Which engines share.


def namespace(
    model: str, *, workers: list[WorkerFacts] | None = None, chunk_blocks: int = 4, **changes: Any
) -> bytes:
    """The namespace of an engine."""
    weights_id = changes.pop("weights_id", None)
    return engine_metadata(
        vllm_config(model, **changes),
        plain_layout(16),
        workers or [WORKER],
        OpalConfig(weights_id=weights_id),
        chunk_blocks * 16,
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
        {"workers": replace(page_format="a digest")},
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


def test_ranks_that_share_and_ranks_that_do_not_have_namespaces_of_their_own() -> None:
    """What rank 1 stored is another rank's where the ranks of a stage store once."""
    ranks = [
        msgspec.structs.replace(WORKER, rank=rank, storage_rank=rank // 2, is_holder=rank % 2 == 0)
        for rank in range(4)
    ]
    alone = [msgspec.structs.replace(one, storage_rank=one.rank, is_holder=True) for one in ranks]

    assert namespace("org/model", workers=ranks) != namespace("org/model", workers=alone)
    assert namespace("org/model", workers=alone) == namespace("org/model", workers=[WORKER] * 4)


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
