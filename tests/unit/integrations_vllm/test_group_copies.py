"""Blocks of several kv groups, which lie over each other in one memory, copied by flat address."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_models import (
    BLOCKS,
    MODELS,
    Specs,
    allocated,
    by_hand,
    full,
    grouped,
    mamba,
    memory,
    pattern,
    spoil,
    vllm_config,
    window,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

from opal_connector.integrations.vllm.groups import ServedGroups, served_groups
from opal_connector.integrations.vllm.layout import (
    LayerCache,
    UnsupportedLayoutError,
    block_views,
)
from opal_connector.integrations.vllm.paged_copy import (
    DevicePagedBlocks,
    GroupViews,
    HostPagedBlocks,
)
from opal_connector.tiers import PagedBlocks

pytestmark = pytest.mark.vllm

COPIERS = [HostPagedBlocks, DevicePagedBlocks]
ROWS = 60
Content = list[dict[str, bytes]]  # by block id: layer name to bytes, as vLLM sees them


def served(config: KVCacheConfig) -> ServedGroups:
    answer = served_groups(vllm_config(), config)
    assert isinstance(answer, ServedGroups), answer
    return answer


def group_views(found: ServedGroups, caches: Mapping[str, LayerCache]) -> GroupViews:
    return {
        kv_group: block_views({name: caches[name] for name in pages}, pages, BLOCKS)
        for kv_group, pages in found.page_bytes.items()
    }


class World:
    """A model's paged memory and the copiers over it."""

    def __init__(self, specs: Specs, layout: str = "LBHNC") -> None:
        self.config = grouped(specs, layout=layout)
        self.caches = allocated(self.config, layout)
        self.served = served(self.config)
        self.views = group_views(self.served, self.caches)

    def held(self, kv_group: int, block_id: int) -> dict[str, bytes]:
        """What a block of a kv group holds in every layer."""
        found = {}
        for name in self.served.page_bytes[kv_group]:
            tensor = self.caches[name]
            parts = tensor.shape[0] // BLOCKS
            part = tensor[block_id * parts : (block_id + 1) * parts]
            found[name] = part.contiguous().view(torch.uint8).numpy().tobytes()
        return found

    def address(self, kv_group: int, block_id: int) -> int:
        return kv_group * BLOCKS + block_id


def check_row(row: np.ndarray, held: dict[str, bytes]) -> None:
    """A row begins with all bytes of the block, in some order of its parts, and ends in zeros."""
    content = b"".join(held.values())
    assert sorted(row[: len(content)].tobytes()) == sorted(content)
    assert not row[len(content) :].any()


def round_trip(
    world: World,
    copier: PagedBlocks,
    moves: Sequence[tuple[int, int, int]],
    tier_rows: Sequence[int],
) -> None:
    """Gather `(kv group, source, target)`, spoil everything, scatter, compare all of the memory."""
    sources = [world.address(kv_group, source) for kv_group, source, _ in moves]
    targets = [world.address(kv_group, target) for kv_group, _, target in moves]
    rows = np.full((ROWS, copier.row_bytes), 7, dtype=np.uint8)
    before = [world.held(kv_group, source) for kv_group, source, _ in moves]
    untouched = memory(world.caches).copy()
    copier.gather(sources, rows, tier_rows, copier.ready_mark())
    assert np.array_equal(memory(world.caches), untouched)
    for row, held in zip(tier_rows, before, strict=True):
        check_row(rows[row], held)
    assert (rows[sorted(set(range(ROWS)) - set(tier_rows))] == 7).all()

    spoil(world.caches, seed=1)
    expected = memory(world.caches).copy()
    copier.scatter(targets, rows, tier_rows, copier.ready_mark())
    for (kv_group, _, target), held in zip(moves, before, strict=True):
        assert world.held(kv_group, target) == held
    # Every byte that is not a target's own is as it was: padding and other groups' blocks.
    written = memory(world.caches).copy()
    memory(world.caches)[...] = expected
    for (_, _, target), held in zip(moves, before, strict=True):
        for name, content in held.items():
            tensor = world.caches[name]
            parts = tensor.shape[0] // BLOCKS
            part = tensor[target * parts : (target + 1) * parts]
            values = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
            part.copy_(values.view(tensor.dtype).reshape(part.shape))
    assert np.array_equal(memory(world.caches), written)


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("model", MODELS)
def test_every_model_survives_a_round_trip(
    model: str, layout: str, copier_class: type[HostPagedBlocks]
) -> None:
    """One job over blocks of all kv groups, in the order in which objects name them."""
    world = World(MODELS[model], layout)
    copier = copier_class(world.views, BLOCKS)
    moves = []
    for kv_group in world.served.page_bytes:
        first = 1 + 3 * kv_group
        moves += [(kv_group, first + step, BLOCKS - 1 - first - step) for step in range(3)]

    round_trip(world, copier, moves, range(5, 5 + len(moves)))


def test_row_is_as_large_as_the_largest_page() -> None:
    """Rows of all kv groups have one size; of a small state the rest is zero."""
    world = World(MODELS["mamba"])
    copier = HostPagedBlocks(world.views, BLOCKS)
    assert copier.row_bytes == 2 * full().page_size_bytes
    rows = np.full((1, copier.row_bytes), 7, dtype=np.uint8)

    copier.gather([world.address(1, 4)], rows, [0], None)

    assert rows[0, :200].tobytes() == b"".join(world.held(1, 4).values())
    assert not rows[0, 200:].any()


@pytest.mark.parametrize("copier_class", COPIERS)
def test_block_of_one_group_does_not_touch_what_lies_in_its_padding(
    copier_class: type[HostPagedBlocks],
) -> None:
    """The same number of two groups is the same memory, and only the content of one is written."""
    world = World(MODELS["mamba"])
    copier = copier_class(world.views, BLOCKS)
    rows = np.full((1, copier.row_bytes), 255, dtype=np.uint8)
    memory(world.caches)[...] = 0

    copier.scatter([world.address(0, 4)], rows, [0], None)

    assert int((memory(world.caches) == 255).sum()) == 2 * 100


@pytest.mark.parametrize("copier_class", COPIERS)
@pytest.mark.filterwarnings("error")
def test_rows_are_copied_out_of_memory_that_is_only_lent(
    copier_class: type[HostPagedBlocks],
) -> None:
    """It may not be written to, and there are other bytes between its rows."""
    world = World(MODELS["dense"])
    copier = copier_class(world.views, BLOCKS)
    rows = np.zeros((3, copier.row_bytes), dtype=np.uint8)
    addresses = [world.address(0, block_id) for block_id in (4, 1, 2)]
    copier.gather(addresses, rows, [0, 1, 2], None)
    wide = np.full((3, copier.row_bytes + 24), 0xA5, dtype=np.uint8)
    wide[:, : copier.row_bytes] = rows
    lent = np.frombuffer(wide.tobytes(), np.uint8).reshape(wide.shape)[:, : copier.row_bytes]
    assert not lent.flags.writeable
    memory(world.caches)[...] = 0

    copier.scatter(addresses, lent, [0, 1, 2], None)

    again = np.zeros_like(rows)
    copier.gather(addresses, again, [0, 1, 2], None)
    assert np.array_equal(again, rows)
    assert rows.any()


@pytest.mark.parametrize("copier_class", COPIERS)
def test_neighbours_in_address_are_not_neighbours_in_memory(
    copier_class: type[HostPagedBlocks],
) -> None:
    """The last block of a group and the first of the next: evenly spaced, and two copies."""
    world = World(MODELS["gemma3"])
    copier = copier_class(world.views, BLOCKS)
    last, first = world.address(0, BLOCKS - 1), world.address(1, 0)
    assert first == last + 1
    rows = np.zeros((4, copier.row_bytes), dtype=np.uint8)

    copier.gather([last - 1, last, first, first + 1], rows, [0, 1, 2, 3], None)

    for row, (kv_group, block_id) in enumerate([(0, BLOCKS - 2), (0, BLOCKS - 1), (1, 0), (1, 1)]):
        check_row(rows[row], world.held(kv_group, block_id))


def test_address_of_no_kv_group_is_an_error() -> None:
    """A job that names what is not there fails; it does not read another group's block."""
    config = by_hand(full(), window(), full(num_kv_heads=2))
    caches = {
        name: torch.zeros((BLOCKS, spec.num_kv_heads, 32, 8))
        for group in config.kv_cache_groups
        for name in group.layer_names
        if isinstance(spec := group.kv_cache_spec, type(full()) | type(window()))
    }
    found = served(config)
    views = {number: views for number, views in group_views(found, caches).items() if number != 1}
    copier = HostPagedBlocks(views, BLOCKS)
    rows = np.zeros((1, copier.row_bytes), dtype=np.uint8)

    for address in (BLOCKS + 3, 3 * BLOCKS, -1):
        with pytest.raises(KeyError):
            copier.gather([address], rows, [0], None)


@pytest.mark.parametrize("copier_class", COPIERS)
def test_single_kv_group_with_a_number_of_its_own(copier_class: type[HostPagedBlocks]) -> None:
    """Groups that are never cached come first in the engine's count: addresses begin behind."""
    world = World(MODELS["dense"])
    copier = copier_class({2: world.views[0]}, BLOCKS)
    rows = np.zeros((3, copier.row_bytes), dtype=np.uint8)

    copier.gather([2 * BLOCKS + 5, 2 * BLOCKS + 4, 2 * BLOCKS], rows, [0, 1, 2], None)
    for row, block_id in enumerate([5, 4, 0]):
        check_row(rows[row], world.held(0, block_id))
    spoil(world.caches, seed=1)
    copier.scatter([2 * BLOCKS + 9], rows, [0], None)

    check_row(rows[0], world.held(0, 9))


@pytest.mark.parametrize("copier_class", COPIERS)
def test_rank_without_a_layer_of_a_group_has_empty_rows(
    copier_class: type[HostPagedBlocks],
) -> None:
    """A stage of a pipeline may have no layer of some kind: its part of such an object is zero."""
    world = World(MODELS["gpt_oss"])
    copier = copier_class({0: [], 1: world.views[1]}, BLOCKS)
    rows = np.full((3, copier.row_bytes), 7, dtype=np.uint8)

    copier.gather([3, BLOCKS + 4], rows, [1, 2], None)
    assert not rows[1].any()
    check_row(rows[2], world.held(1, 4))
    before = memory(world.caches).copy()
    copier.scatter([5], rows, [2], None)

    assert np.array_equal(memory(world.caches), before)


# States in several tensors.


def states(block_count: int = BLOCKS) -> dict[str, LayerCache]:
    """Two layers, each as one tensor per state over a padded page of 256 bytes."""
    caches: dict[str, LayerCache] = {}
    for seed, name in enumerate(["g0.a", "g0.b"]):
        draw = np.random.default_rng(seed)
        raw = torch.from_numpy(draw.integers(0, 256, block_count * 256, dtype=np.uint8))
        first = torch.as_strided(raw.view(torch.float32), (block_count, 3, 5), (64, 5, 1), 0)
        second = torch.as_strided(raw.view(torch.bfloat16), (block_count, 2, 10), (128, 10, 1), 30)
        caches[name] = [first, second]
    return caches


@pytest.mark.parametrize("copier_class", COPIERS)
def test_layer_of_several_tensors_is_one_page(copier_class: type[HostPagedBlocks]) -> None:
    """A layer's states are copied together, and their padding is not."""
    caches = states()
    found = served(by_hand(mamba(page_size_padded=256)))
    copier = copier_class(group_views(found, caches), BLOCKS)
    assert copier.row_bytes == 200
    before = [tensor[3].clone() for cache in caches.values() for tensor in cache]
    rows = np.zeros((1, copier.row_bytes), dtype=np.uint8)

    copier.gather([3], rows, [0], None)
    for cache in caches.values():
        for tensor in cache:
            tensor.zero_()
    copier.scatter([8], rows, [0], None)

    after = [tensor[8] for cache in caches.values() for tensor in cache]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_states_that_are_not_all_there_are_refused() -> None:
    """A part of a state is no state; the error names the layer."""
    caches = states()
    caches["g0.b"] = list(caches["g0.b"])[:1]

    with pytest.raises(UnsupportedLayoutError, match=r"^g0.b: a block has 100 bytes"):
        group_views(served(by_hand(mamba(page_size_padded=256))), caches)


# Anything.


def spec_lists() -> st.SearchStrategy[dict[str, Any]]:
    """Layers of up to four kinds and sizes, whose pages vLLM can bring to one size."""
    kinds = st.sampled_from(
        [
            full(),
            window(),
            window(sliding_window=96),
            full(dtype=torch.bfloat16, head_size=8),
            window(num_kv_heads=2),
            mamba(),
            mamba(shapes=((4,),), dtypes=(torch.float32,)),
        ]
    )
    return st.builds(
        lambda chosen, repeats: pattern(*chosen, repeats=repeats),
        st.lists(kinds, min_size=1, max_size=4),
        st.integers(1, 3),
    )


@given(specs=spec_lists(), layout=st.sampled_from(["LBHNC", "BLHNC"]), data=st.data())
def test_any_addresses_of_any_layout_survive_a_round_trip(
    specs: Specs, layout: str, data: st.DataObject
) -> None:
    """No block is of two groups at a time; beyond that any order of groups, blocks and rows."""
    world = World(specs, layout)
    kv_groups = st.sampled_from(sorted(world.served.page_bytes))
    blocks = st.permutations(range(BLOCKS))
    count = data.draw(st.integers(1, BLOCKS))
    owners = data.draw(st.lists(kv_groups, min_size=count, max_size=count))
    if data.draw(st.booleans()):
        owners.sort()
    sources = data.draw(blocks)[:count]
    targets = data.draw(blocks)[:count]
    if data.draw(st.booleans()):
        sources = sorted(sources)
    first_row = data.draw(st.integers(0, ROWS - count))
    tier_rows = data.draw(
        st.one_of(
            st.just(list(range(first_row, first_row + count))),
            st.permutations(range(ROWS)).map(lambda rows: rows[:count]),
        )
    )
    moves = list(zip(owners, sources, targets, strict=True))
    made = []
    for copier_class in COPIERS:
        spoil(world.caches, seed=0)
        copier = copier_class(world.views, BLOCKS)
        rows = np.zeros((ROWS, copier.row_bytes), dtype=np.uint8)
        copier.gather([world.address(*move[:2]) for move in moves], rows, tier_rows, None)
        made.append(rows)
        round_trip(world, copier, moves, tier_rows)
    assert np.array_equal(made[0], made[1])
