"""Blocks of every layout that vLLM hands over, found by strides and copied whole."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from opal_connector.integrations.vllm.layout import (
    BlockView,
    UnsupportedLayoutError,
    block_views,
)
from opal_connector.integrations.vllm.paged_copy import (
    DevicePagedBlocks,
    HostPagedBlocks,
    paged_blocks,
)
from opal_connector.tiers import PagedBlocks

pytestmark = pytest.mark.vllm

BLOCKS = 11
COPIERS = [HostPagedBlocks, DevicePagedBlocks]
Tensors = dict[str, torch.Tensor]


def attention(**changes: object) -> FullAttentionSpec:
    fields: dict[str, object] = {
        "block_size": 16,
        "num_kv_heads": 3,
        "head_size": 4,
        "dtype": torch.float32,
    }
    return FullAttentionSpec(**{**fields, **changes})


def allocate(
    layout: KVCacheLayout,
    specs: Sequence[tuple[KVCacheSpec, Sequence[str]]],
    *,
    kernel_block_tokens: int | None = None,
) -> tuple[Tensors, dict[str, int]]:
    """Tensors as vLLM allocates and views them, filled with random bytes, and the page sizes."""
    whole_block = sum(spec.page_size_bytes * len(names) for spec, names in specs)
    tensors = []
    offset = 0
    for spec, names in specs:
        fixed = whole_block if layout.is_block_outermost else None
        layer_stride, block_stride, *_ = compute_layout_strides(
            spec, BLOCKS, len(names), layout, fixed_strides=(None, fixed, None, None, None)
        )
        tensors.append(
            KVCacheTensor(
                size=whole_block * BLOCKS,
                layers=list(names),
                layer_stride=layer_stride,
                block_stride=block_stride,
                offset=offset,
            )
        )
        step = spec.page_size_bytes if layout.is_block_outermost else layer_stride
        offset += len(names) * step
    by_layer = {name: spec for spec, names in specs for name in names}
    group_spec: KVCacheSpec = specs[0][0]
    if len(specs) > 1:
        group_spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=by_layer)
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(list(by_layer), group_spec)],
    )
    sizes = None if kernel_block_tokens is None else [kernel_block_tokens]
    caches = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    fill(caches, seed=0)
    return caches, {name: spec.page_size_bytes for name, spec in by_layer.items()}


def fill(caches: Tensors, seed: int) -> None:
    """Random bytes in everything that the tensors lie in, padding too."""
    draw = np.random.default_rng(seed)
    for tensor in {t.untyped_storage().data_ptr(): t for t in caches.values()}.values():
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        storage.copy_(torch.from_numpy(draw.integers(0, 256, storage.numel(), dtype=np.uint8)))


def logical(caches: Tensors, block_id: int) -> dict[str, bytes]:
    """What a block holds in every layer, as vLLM sees it."""
    held = {}
    for name, tensor in caches.items():
        kernel_blocks = tensor.shape[0] // BLOCKS
        part = tensor[block_id * kernel_blocks : (block_id + 1) * kernel_blocks]
        held[name] = part.contiguous().view(torch.uint8).numpy().tobytes()
    return held


def everything(caches: Tensors) -> bytes:
    """All bytes of the storage that the tensors lie in."""
    storage = next(iter(caches.values())).untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def round_trip(
    copier: PagedBlocks,
    caches: Tensors,
    moves: Sequence[tuple[int, int]],
    tier_rows: Sequence[int],
) -> None:
    """Gather the sources, spoil everything, scatter to the targets, compare every block."""
    sources = [source for source, _ in moves]
    targets = [target for _, target in moves]
    rows = np.zeros((40, copier.row_bytes), dtype=np.uint8)
    before = [logical(caches, source) for source in sources]
    copier.gather(sources, rows, tier_rows, copier.ready_mark())
    for row, held in zip(tier_rows, before, strict=True):
        assert sorted(rows[row].tobytes()) == sorted(b"".join(held.values()))
    others = set(range(40)) - set(tier_rows)
    assert not rows[sorted(others)].any(), "a row that was not asked for was written"

    fill(caches, seed=1)
    spoiled = [logical(caches, block_id) for block_id in range(BLOCKS)]
    copier.scatter(targets, rows, tier_rows, copier.ready_mark())

    for block_id in range(BLOCKS):
        expected = spoiled[block_id]
        if block_id in targets:
            expected = before[targets.index(block_id)]
        assert logical(caches, block_id) == expected, f"block {block_id}"


LAYOUTS = list(KVCacheLayout)


# Every layout.


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_of_every_layout_survive_a_round_trip(
    layout: KVCacheLayout, layers: int, copier_class: type[HostPagedBlocks]
) -> None:
    """Block b of every layer goes to a row and to another block, and no other byte changes."""
    caches, pages = allocate(layout, [(attention(), [f"l{i}" for i in range(layers)])])
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)

    assert copier.row_bytes == sum(pages.values())
    round_trip(copier, caches, [(3, 7), (0, 10), (10, 1), (4, 4)], [5, 0, 39, 6])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_host_and_device_copier_make_the_same_rows(layout: KVCacheLayout) -> None:
    """What a GPU engine stores is laid out as the same engine's host copier would lay it out."""
    caches, pages = allocate(layout, [(attention(), ["a", "b"])])
    views = block_views(caches, pages, BLOCKS)
    ids, tier_rows = [9, 2, 3, 4, 8, 6, 0], [1, 2, 3, 9, 8, 7, 20]
    made = []
    for copier_class in COPIERS:
        rows = np.zeros((40, sum(pages.values())), dtype=np.uint8)
        copier_class({0: views}, BLOCKS).gather(ids, rows, tier_rows, None)
        made.append(rows)

    assert np.array_equal(made[0], made[1])


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_blocks_and_rows(seed: int, copier_class: type[HostPagedBlocks]) -> None:
    """VLLM hands out blocks ascending, descending, evenly spaced and at random; rows likewise."""
    draw = np.random.default_rng(seed)
    caches, pages = allocate(KVCacheLayout.LBHNC, [(attention(), ["a", "b"])])
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)
    for _ in range(12):
        count = int(draw.integers(1, BLOCKS + 1))
        sources, targets = draw.permutation(BLOCKS)[:count], draw.permutation(BLOCKS)[:count]
        tier_rows = draw.permutation(40)[:count]
        kind = draw.integers(4)
        if kind == 0:
            sources, targets = np.sort(sources), np.sort(targets)[::-1]
        elif kind == 1:
            sources = np.arange(count)[::-1]
            tier_rows = np.arange(count) + int(draw.integers(0, 20))
        elif kind == 2:
            sources = np.arange(0, BLOCKS, 2)[: (count + 1) // 2]
            targets, tier_rows = targets[: len(sources)], np.sort(tier_rows[: len(sources)])
        fill(caches, seed=0)
        moves = [(int(s), int(t)) for s, t in zip(sources, targets, strict=True)]
        round_trip(copier, caches, moves, [int(row) for row in tier_rows])


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("ids", [[4, 4], [4, 4, 4, 5], [0, 0], [3, 2, 2, 1], [BLOCKS - 1] * 3])
def test_block_that_is_asked_for_twice_is_copied_twice(
    ids: list[int], copier_class: type[HostPagedBlocks]
) -> None:
    """No run of blocks is read wrongly, not even one that stands still."""
    caches, pages = allocate(KVCacheLayout.LBHNC, [(attention(), ["a"])])
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)
    rows = np.zeros((8, copier.row_bytes), dtype=np.uint8)

    copier.gather(ids, rows, range(len(ids)), None)

    for row, block_id in enumerate(ids):
        assert rows[row].tobytes() == logical(caches, block_id)["a"]


# Shapes of pages.


@pytest.mark.parametrize(
    "spec",
    [
        attention(dtype=torch.bfloat16),
        attention(dtype=torch.uint8),
        attention(head_size_v=8),
        attention(num_kv_heads=1),
        attention(block_size=1),
        MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=20, dtype=torch.bfloat16),
        attention(state_content_bytes=4 * 2 * 4 + 8, dtype=torch.int8),
    ],
    ids=["bf16", "bytes", "other-v", "one-head", "one-token", "mla", "scales-in-content"],
)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLNHC])
def test_every_kind_of_page(layout: KVCacheLayout, spec: KVCacheSpec) -> None:
    """Item sizes, heads and packed scales: a block is bytes, never numbers."""
    caches, pages = allocate(layout, [(spec, ["a", "b"])])

    round_trip(
        HostPagedBlocks({0: block_views(caches, pages, BLOCKS)}, BLOCKS),
        caches,
        [(1, 2), (2, 1), (7, 9)],
        [3, 2, 1],
    )


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_layers_of_two_sizes_in_one_group(
    layout: KVCacheLayout, copier_class: type[HostPagedBlocks]
) -> None:
    """A group of uniform type may have pages of several sizes; a row holds all of them."""
    small, large = attention(), attention(head_size=12)
    caches, pages = allocate(layout, [(small, ["a", "c"]), (large, ["b"])])
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)

    assert copier.row_bytes == 2 * small.page_size_bytes + large.page_size_bytes
    round_trip(copier, caches, [(5, 6), (6, 5)], [0, 1])


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("kernel_block_tokens", [16, 8, 4])
def test_kernel_blocks_inside_a_block(
    kernel_block_tokens: int, copier_class: type[HostPagedBlocks]
) -> None:
    """A kernel's smaller blocks: block b is its adjoining kernel blocks, moved together."""
    caches, pages = allocate(
        KVCacheLayout.LBHNC,
        [(attention(), ["a", "b"])],
        kernel_block_tokens=kernel_block_tokens,
    )
    assert caches["a"].shape[0] == BLOCKS * 16 // kernel_block_tokens
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)

    round_trip(copier, caches, [(3, 7), (9, 2)], [1, 0])


def test_layers_that_share_their_kv_are_copied_once() -> None:
    """A layer that reuses another's cache aliases its page: the row does not hold it twice."""
    caches, pages = allocate(KVCacheLayout.LBHNC, [(attention(), ["a", "b"])])
    shared = {**caches, "a2": caches["a"], "b2": caches["b"].view_as(caches["b"])}
    sizes = {**pages, "a2": pages["a"], "b2": pages["b"]}

    copier = HostPagedBlocks({0: block_views(shared, sizes, BLOCKS)}, BLOCKS)

    assert copier.row_bytes == sum(pages.values())
    round_trip(copier, caches, [(3, 7), (9, 2)], [1, 0])


def test_order_of_the_layers_does_not_change_a_row() -> None:
    """Two processes that name the layers in another order still read each other's rows."""
    caches, pages = allocate(KVCacheLayout.LBHNC, [(attention(), ["a", "b", "c"])])
    made = []
    for names in (["a", "b", "c"], ["c", "a", "b"]):
        views = block_views({name: caches[name] for name in names}, pages, BLOCKS)
        copier = HostPagedBlocks({0: views}, BLOCKS)
        rows = np.zeros((1, copier.row_bytes), dtype=np.uint8)
        copier.gather([4], rows, [0], None)
        made.append(rows.tobytes())

    assert made[0] == made[1]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layers_at_one_distance_are_one_view(layout: KVCacheLayout) -> None:
    """Few large copies: a hundred layers are not a hundred copies per block."""
    caches, pages = allocate(layout, [(attention(), [f"l{i}" for i in range(5)])])

    views = block_views(caches, pages, BLOCKS)

    assert len(views) == 1
    assert sum(view.block_bytes for view in views) == sum(pages.values())
    if layout.is_block_outermost:
        assert views[0].dims == ((sum(pages.values()), 1),), "a block is one contiguous piece"


def test_tensors_of_their_own_are_views_of_their_own() -> None:
    """Layers that do not share an allocation are not merged by the accident of their addresses."""
    shape = (BLOCKS, 2, 4, 8)
    caches = {name: torch.zeros(shape) for name in ("a", "b")}
    for seed, tensor in enumerate(caches.values()):
        tensor.view(torch.uint8).copy_(
            torch.randint(0, 256, (BLOCKS, 2, 4, 32), generator=torch.manual_seed(seed)).byte()
        )
    pages = dict.fromkeys(caches, 2 * 4 * 8 * 4)
    views = block_views(caches, pages, BLOCKS)
    assert len(views) == 2
    copier = HostPagedBlocks({0: views}, BLOCKS)
    rows = np.zeros((1, copier.row_bytes), dtype=np.uint8)
    held = logical(caches, 3)

    copier.gather([3], rows, [0], None)

    assert sorted(rows.tobytes()) == sorted(held["a"] + held["b"])


# HT-06: bytes of a page that the view does not show.


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_ht_06_padded_page_is_copied_whole(
    layout: KVCacheLayout, copier_class: type[HostPagedBlocks]
) -> None:
    """Scales or padding behind the view belong to the block: all page bytes are moved."""
    plain = attention()
    spec = attention(page_size_padded=plain.page_size_bytes + 64)
    caches, pages = allocate(layout, [(spec, ["a", "b"])])
    assert pages["a"] == plain.page_size_bytes + 64
    copier = copier_class({0: block_views(caches, pages, BLOCKS)}, BLOCKS)
    assert copier.row_bytes == 2 * pages["a"]
    rows = np.zeros((BLOCKS, copier.row_bytes), dtype=np.uint8)
    before = everything(caches)

    copier.gather(range(BLOCKS), rows, range(BLOCKS), None)
    fill(caches, seed=1)
    assert everything(caches) != before
    copier.scatter(range(BLOCKS), rows, range(BLOCKS), None)

    assert everything(caches) == before


def unreachable() -> list[tuple[str, Tensors, dict[str, int], int]]:
    """Tensors whose blocks cannot be copied faithfully, with what is wrong about them."""
    dense = torch.zeros((BLOCKS, 2, 4, 8), dtype=torch.int8)
    by_head = torch.zeros((2, BLOCKS, 4, 8), dtype=torch.int8).permute(1, 0, 2, 3)
    padded = torch.zeros((BLOCKS, 80), dtype=torch.int8)[:, :64].unflatten(1, (2, 4, 8))
    last = torch.zeros(BLOCKS * 80 - 16, dtype=torch.int8).as_strided((BLOCKS, 64), (80, 1))
    return [
        ("page-larger-than-stride", {"l": dense}, {"l": 65}, BLOCKS),
        ("page-smaller-than-view", {"l": dense}, {"l": 63}, BLOCKS),
        ("not-contiguous", {"l": by_head}, {"l": 72}, BLOCKS),
        ("padding-beyond-stride", {"l": padded}, {"l": 81}, BLOCKS),
        ("padding-beyond-storage", {"l": last}, {"l": 80}, BLOCKS),
        ("kernel-blocks-do-not-divide", {"l": dense}, {"l": 64}, BLOCKS - 1),
        ("no-blocks", {"l": dense}, {"l": 64}, 0),
    ]


@pytest.mark.parametrize(
    ("caches", "pages", "block_count"),
    [case[1:] for case in unreachable()],
    ids=[case[0] for case in unreachable()],
)
def test_ht_06_page_that_cannot_be_copied_whole_is_refused(
    caches: Tensors, pages: dict[str, int], block_count: int
) -> None:
    """Half a page would be garbage from the first token on; the error names the layer."""
    with pytest.raises(UnsupportedLayoutError, match=r"^l: "):
        block_views(caches, pages, block_count)


# The choice of the copier.


def test_tensors_in_host_memory_get_the_host_copier() -> None:
    """No staging where there is no device."""
    caches, pages = allocate(KVCacheLayout.LBHNC, [(attention(), ["a"])])

    made = paged_blocks({0: block_views(caches, pages, BLOCKS)}, BLOCKS)

    assert isinstance(made, HostPagedBlocks)
    assert made.ready_mark() is None


def test_block_view_counts_its_bytes() -> None:
    """Of one block, over all its dimensions."""
    view = BlockView(torch.zeros(1), 0, 100, ((3, 40), (2, 10), (5, 1)))

    assert view.block_bytes == 30
