"""Which models are served, and as what: vLLM's kv groups in Opal's terms."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from kv_models import (
    BLOCKS,
    CHUNK,
    FIELDS,
    MODELS,
    WINDOW,
    allocated,
    by_hand,
    chunked,
    full,
    grouped,
    mamba,
    mla,
    pattern,
    vllm_config,
    window,
)
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    get_kv_cache_coordinator,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from opal_connector.integrations.vllm.facts import attention_names
from opal_connector.integrations.vllm.groups import (
    SERVED_SPECS,
    ServedGroups,
    attention_group,
    served_groups,
)
from opal_connector.keys import AttentionGroup, AttentionLayout
from opal_connector.keys.attention import RETENTIONS

pytestmark = pytest.mark.vllm


def served(config: KVCacheConfig, **changes: Any) -> ServedGroups:
    """What is served of a model that is served."""
    answer = served_groups(vllm_config(**changes), config)
    assert isinstance(answer, ServedGroups), answer
    return answer


def scheduler_config(config: KVCacheConfig) -> KVCacheConfig:
    """The same model as vLLM's scheduler sees it."""
    return generate_scheduler_kv_cache_config([config])


# The layout.

FULL_GROUP = {"kind": "full_attention", "block_tokens": 32}
EXPECTED: dict[str, list[dict[str, Any]]] = {
    "dense": [FULL_GROUP],
    "two_sizes": [FULL_GROUP],
    "mla": [{"kind": "mla_attention", "block_tokens": 32}],
    "window_only": [{"kind": "sliding_window", "block_tokens": 32, "span_tokens": WINDOW}],
    "gemma3": [
        {**FULL_GROUP, "kv_groups": (5,)},
        {
            "kind": "sliding_window",
            "block_tokens": 32,
            "span_tokens": WINDOW,
            "kv_groups": (0, 1, 2, 3, 4),
        },
    ],
    "gpt_oss": [
        {**FULL_GROUP, "kv_groups": (1,)},
        {"kind": "sliding_window", "block_tokens": 32, "span_tokens": WINDOW, "kv_groups": (0,)},
    ],
    "llama4": [
        {**FULL_GROUP, "kv_groups": (3,)},
        {
            "kind": "chunked_local_attention",
            "block_tokens": 32,
            "span_tokens": CHUNK,
            "kv_groups": (0, 1, 2),
        },
    ],
    "mamba": [
        {**FULL_GROUP, "kv_groups": (2,)},
        {"kind": "mamba", "block_tokens": 32, "kv_groups": (0, 1)},
    ],
    "differing_blocks": [
        {"kind": "full_attention", "block_tokens": 64, "kv_groups": (0,)},
        {"kind": "sliding_window", "block_tokens": 32, "span_tokens": WINDOW, "kv_groups": (1, 2)},
    ],
}


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model_has_its_layout(model: str) -> None:
    """Groups of one spec are one, full attention is first, spans are vLLM's."""
    found = served(grouped(MODELS[model])).layout

    assert found == AttentionLayout(tuple(AttentionGroup(**group) for group in EXPECTED[model]))
    assert found.is_plain == (model in ("dense", "two_sizes", "mla"))


@pytest.mark.parametrize("model", [name for name in MODELS if len(EXPECTED[name]) > 1])
def test_layout_is_that_of_vllm_s_coordinator(model: str) -> None:
    """The same kv groups together in the same order, the same hash blocks and alignment."""
    config = scheduler_config(grouped(MODELS[model]))
    resolving: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            block_size=32, prefix_match_unit=None, enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
    )
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(config, resolving)
    coordinator = get_kv_cache_coordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=scheduler_tokens,
        hash_block_size=hash_tokens,
    )
    assert isinstance(coordinator, HybridKVCacheCoordinator)

    layout = served(config).layout

    theirs = [tuple(group.group_ids) for group in coordinator.attention_groups]
    assert [group.kv_groups for group in layout.groups] == theirs
    assert (layout.alignment_tokens, layout.hash_block_tokens) == (scheduler_tokens, hash_tokens)


PACKED = {
    "two_sizes": MODELS["two_sizes"],
    "two_sizes_each": pattern(window(), window(head_size=8), full(), full(head_size=8), repeats=2),
    "windows_of_two": pattern(window(), window(sliding_window=96), full(head_size=8), repeats=2),
}


@pytest.mark.parametrize("model", PACKED)
def test_scheduler_and_worker_see_one_layout(model: str) -> None:
    """VLLM's scheduler keeps one layer's spec for a group of layers of several sizes."""
    worker = grouped(PACKED[model], layout="BLHNC")
    kinds = {type(group.kv_cache_spec) for group in worker.kv_cache_groups}
    assert UniformTypeKVCacheSpecs in kinds, "the case is a real one"
    scheduler = scheduler_config(worker)
    assert not any(
        isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        for group in scheduler.kv_cache_groups
    )

    assert served(worker).layout == served(scheduler).layout
    assert served(worker).is_plain == served(scheduler).is_plain


def test_windows_of_two_sizes_are_two_groups() -> None:
    """What must be there for a hit differs."""
    layout = served(by_hand(window(), full(), window(sliding_window=96), window())).layout

    assert [group.kv_groups for group in layout.groups] == [(1,), (0, 3), (2,)]
    assert [group.span_tokens for group in layout.groups] == [0, WINDOW, 96]


def test_tokens_that_are_kept_below_a_window_are_known() -> None:
    """A draft of several modules lets vLLM allocate more than the window."""
    layout = served(by_hand(full(), window(extra_retained_tokens=3))).layout

    assert layout.groups[1].extra_tokens == 3
    assert layout.groups[1].skipped_tokens(100) == 100 - WINDOW + 1 - 3


def test_sliding_window_mla_has_a_window() -> None:
    """The latent of a window is not that of all tokens."""
    spec = SlidingWindowMLASpec(**{**FIELDS, "sliding_window": WINDOW})

    assert served(by_hand(spec)).layout.groups == (
        AttentionGroup(kind="sliding_window_mla", block_tokens=32, span_tokens=WINDOW),
    )


def test_groups_that_are_never_cached_are_left_out() -> None:
    """A scratch group has a number and blocks of its own, which no job ever names."""
    scratch = CircularBufferSpec(**{**FIELDS, "block_size": 8})
    bounded = SlidingWindowMLASpec(**{**FIELDS, "sliding_window": WINDOW, "bounded_replay": True})
    found = served(by_hand(scratch, full(), bounded))

    assert found.layout.groups == (AttentionGroup(block_tokens=32, kv_groups=(1,)),)
    assert set(found.page_bytes) == {1}
    assert found.layout.scratch_tokens == 32
    assert not found.is_plain, "vLLM takes no single blocks as failed when it has several groups"


def test_hits_end_where_blocks_of_scratch_groups_end_too() -> None:
    """VLLM's scheduler rounds a hit down to that, and a load of more than it took is lost."""
    scratch = CircularBufferSpec(**{**FIELDS, "block_size": 48})
    layout = served(by_hand(scratch, full())).layout

    assert (layout.hash_block_tokens, layout.alignment_tokens) == (32, 96)


@pytest.mark.parametrize(
    ("flagged", "drops", "expected"),
    [
        (set(), None, [False, False]),
        (set(), False, [False, False]),
        (set(), True, [True, True]),
        ({0}, True, [False, True]),
        ({2}, True, [False, True]),
        ({1}, True, [True, False]),
    ],
)
def test_draft_groups_are_those_of_vllm(
    flagged: set[int], drops: bool | None, expected: list[bool]
) -> None:
    """One flagged kv group flags all of its spec; none flagged means that all may be."""
    config = by_hand(window(), full(), window())
    for number in flagged:
        config.kv_cache_groups[number].is_eagle_group = True

    layout = served(config, drops_draft_blocks=drops).layout

    assert [group.is_draft for group in layout.groups] == expected


def test_every_served_kind_is_known_to_the_books() -> None:
    """A kind that is served has a retention, and its entry makes specs of that kind."""
    assert {kind.value for kind in SERVED_SPECS} <= set(RETENTIONS)
    for spec in (full(), mla(), window(), chunked(), mamba()):
        assert SERVED_SPECS[get_kv_cache_spec_kind(spec)].spec_type is type(spec)


# Pages.


def test_padding_between_kv_groups_is_no_content() -> None:
    """A state of 100 bytes in a page of a kilobyte: 100 bytes."""
    found = served(grouped(MODELS["mamba"]))

    assert found.page_bytes == {
        0: {"layers.00": 100, "layers.03": 100},
        1: {"layers.01": 100, "layers.04": 100},
        2: dict.fromkeys(["layers.02", "layers.05"], full().page_size_bytes),
    }
    padded = by_hand(full(), window(page_size_padded=4096))
    assert set(served(padded).page_bytes[1].values()) == {window().page_size_bytes}


def test_page_of_a_dense_model_is_taken_whole() -> None:
    """What such models have stored so far is laid out like this."""
    config = by_hand(full(page_size_padded=4096))

    assert served(config).page_bytes == {0: {"g0.a": 4096, "g0.b": 4096}}


def test_layers_of_other_sizes_have_their_own_page_bytes() -> None:
    """A worker asks every layer's spec; a layer without one reads another's page."""
    spec = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={"g0.a": full(), "g0.b": full(head_size=8)}
    )
    config = by_hand(spec)
    config.kv_cache_groups[0].layer_names.append("g0.c")

    assert served(config).page_bytes == {
        0: {"g0.a": full().page_size_bytes, "g0.b": full(head_size=8).page_size_bytes}
    }


def test_dense_models_keep_their_namespace() -> None:
    """Only models that were never stored before have a page format."""
    assert {name for name in MODELS if not served(grouped(MODELS[name])).page_format} == {
        "dense",
        "two_sizes",
        "mla",
    }


@pytest.mark.parametrize(
    "changed",
    [
        by_hand(full(), mamba(shapes=((5, 3), (2, 10)))),
        by_hand(full(), mamba(dtypes=(torch.float32, torch.float16))),
        by_hand(mamba(), full()),
        by_hand(full(head_size=8, num_kv_heads=1), mamba()),
        by_hand(full(num_kv_heads=2, head_size=2), mamba()),
        by_hand(full(dtype=torch.int32), mamba()),
        by_hand(full(block_size=64), mamba()),
        by_hand(full(), mamba(block_size=64)),
        by_hand(full(), full(), mamba()),
        by_hand(full(), window()),
        by_hand(full(), window(sliding_window=96)),
        by_hand(full(), chunked()),
        by_hand(full(), chunked(attention_chunk_size=96)),
    ],
)
def test_page_format_tells_apart_what_sizes_do_not(changed: KVCacheConfig) -> None:
    """Shapes, types, spans, order and numbers of kv groups: no two of these share a cache."""
    others = [by_hand(full(), mamba()), by_hand(full(), window(), window(sliding_window=32))]
    formats = {served(config).page_format for config in [changed, *others]}

    assert len(formats) == 3


def test_page_format_knows_the_layers() -> None:
    """The same pages of other layers are other pages."""
    renamed = by_hand(full(), mamba())
    renamed.kv_cache_groups[1].layer_names[0] = "other"

    assert served(renamed).page_format != served(by_hand(full(), mamba())).page_format
    again = served(by_hand(full(), mamba())).page_format
    assert again == served(by_hand(full(), mamba())).page_format


# Names of the attention.


def layer(name: str, head_size: int = 32) -> Any:
    backend = SimpleNamespace(get_name=lambda: name)
    return SimpleNamespace(attn_backend=backend, head_size=head_size)


def test_model_that_begins_with_states_has_its_instruction_set() -> None:
    """It is that of the attention; a layer of states names its backend in a way of its own."""
    config = by_hand(mamba(), full())
    states = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "SSM"))
    layers = {"g0.a": states, "g0.b": states, "g1.a": layer("CPU_ATTN"), "g1.b": layer("CPU_ATTN")}

    backend, isa = attention_names(vllm_config(layers=layers), served(config))

    assert backend == "CPU_ATTN+SSM"
    dense = attention_names(
        vllm_config(layers={"g0.a": layer("CPU_ATTN")}), served(by_hand(full()))
    )
    assert (dense[0], isa) == ("CPU_ATTN", dense[1])
    assert isa not in ("none", "")


def test_states_alone_have_no_instruction_set() -> None:
    """And neither has anything on another device."""
    assert attention_names(vllm_config(), served(by_hand(mamba()))) == ("unknown", "none")
    on_gpu = vllm_config(layers={"g0.a": layer("FLASH")}, device="cuda")
    assert attention_names(on_gpu, served(by_hand(full()))) == ("FLASH", "none")


def test_blocks_of_other_sizes_may_have_other_instruction_sets() -> None:
    """Both are named: an engine with only one of them reads other bytes."""
    layers = {"g0.a": layer("CPU_ATTN"), "g1.a": layer("CPU_ATTN")}
    config = by_hand(full(block_size=48), window(block_size=32))

    _, isa = attention_names(vllm_config(layers=layers), served(config))

    assert "+" in isa


def test_spec_of_vllm_is_exactly_what_is_expected() -> None:
    """The allocation of the helper is of the model that it was asked for."""
    config = grouped(MODELS["gemma3"])
    assert config.num_blocks == BLOCKS
    assert {type(group.kv_cache_spec) for group in config.kv_cache_groups} == {
        SlidingWindowSpec,
        FullAttentionSpec,
    }
    assert set(allocated(config)) == set(MODELS["gemma3"])


def test_states_are_never_a_draft_s() -> None:
    """A draft model has no such layers: asking for one state more would find none."""
    assert attention_group(full(), [0], is_draft=True).is_draft
    assert not attention_group(mamba(), [0], is_draft=True).is_draft
