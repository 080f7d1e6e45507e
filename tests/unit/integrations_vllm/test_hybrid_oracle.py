"""vLLM's own coordinator as the oracle of ours: which lengths hit, and which blocks a load fills.

No model and no engine: hand-made specs, a pool that answers from a set, and a real KVCacheManager.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fakes import ROW_BYTES

pytest.importorskip("vllm")

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kv_models import chunked, full, mamba, window
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.request import Request

from opal_connector.config import OpalConfig
from opal_connector.events import EventLog
from opal_connector.integrations.vllm.groups import _attention_groups
from opal_connector.keys import CHAIN_ROOT, AttentionLayout
from opal_connector.managers import (
    BlockTables,
    Hybrid,
    OpalKVCacheManager,
    TierPool,
    Unitary,
    build_manager,
)
from opal_connector.transfers import ObjectName

pytestmark = pytest.mark.vllm

POOL_BLOCKS = 2048
UNIT = 32  # the smallest block here
MOST_UNITS = 24
NO_SPECULATION = SimpleNamespace(speculative_config=None)
TOKENS = [(7919 * place + 13) % 30000 for place in range(MOST_UNITS * UNIT + 1)]


class Model(NamedTuple):
    """kv groups as vLLM has them, and the same as ours."""

    config: KVCacheConfig
    layout: AttentionLayout

    @property
    def alignment(self) -> int:
        return self.layout.alignment_tokens


def model_of(specs: list[KVCacheSpec]) -> Model:
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    config = KVCacheConfig(POOL_BLOCKS, [], groups)
    return Model(config, AttentionLayout(_attention_groups(NO_SPECULATION, config)))


@st.composite
def models(draw: st.DrawFn, *, most_extra_tokens: int = 0) -> Model:
    """One to four kinds, some of them several times, in any order, with blocks of any sizes.

    vLLM keeps `most_extra_tokens` at most below a window, which its own lookup does not ask for.
    """
    sizes = st.sampled_from([UNIT, UNIT, 2 * UNIT, 4 * UNIT])
    one_size = draw(st.booleans())
    common = draw(sizes)

    def size() -> int:
        return common if one_size else draw(sizes)

    specs: list[KVCacheSpec] = []
    if draw(st.sampled_from([True, True, True, False])):
        specs += [full(block_size=size())] * draw(st.integers(1, 2))
    for _ in range(draw(st.integers(0, 2))):
        span, extra = draw(st.integers(2, 9 * UNIT)), draw(st.integers(0, most_extra_tokens))
        spec = window(block_size=size(), sliding_window=span, extra_retained_tokens=extra)
        specs += [spec] * draw(st.integers(1, 3))
    if draw(st.booleans()):
        specs += [mamba(block_size=size(), page_size_padded=None)] * draw(st.integers(1, 2))
    if one_size and draw(st.booleans()):  # vLLM has chunks only where all blocks are alike
        specs += [chunked(block_size=common, attention_chunk_size=draw(st.integers(1, 4)) * common)]
    assume(len(specs) > 1)
    return model_of(draw(st.permutations(specs)))


class Pool:
    """What vLLM's managers ask of a pool; it holds `present`: (kv group, hash) of each block."""

    def __init__(self, present: set[tuple[int, bytes]], hash_block_size: int) -> None:
        self.null_block = SimpleNamespace(is_null=True)
        self.hash_block_size = hash_block_size
        self._present = present

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Any:
        if all((group, bytes(block_hash)) in self._present for group in kv_cache_group_ids):
            return [SimpleNamespace(is_null=False) for _ in kv_cache_group_ids]
        return None


def books_of(model: Model) -> OpalKVCacheManager:
    """Empty books with chunks of two alignments."""
    return build_manager(
        OpalConfig(kvc_tiers=("CPUMemory",)),
        layout=model.layout,
        chunk_blocks=2 * model.alignment // model.layout.hash_block_tokens,
        spaces={"CPUMemory": TierPool(capacity_rows=1 << 14, row_bytes=ROW_BYTES)},
        log=EventLog(enabled=False),
    )


def fill(
    draw: st.DrawFn, model: Model, books: OpalKVCacheManager, hashes: list[bytes]
) -> set[tuple[int, bytes]]:
    """Enter the beginnings of random chunks of every group; what is there by kv group and hash."""
    request = books.new_request("fill")
    request.chain.hashes.extend(hashes)
    density = draw(st.sampled_from([1, 3, 9]))
    present: set[tuple[int, bytes]] = set()
    for group, manager in enumerate(books.coordinator.managers):
        own = books.coordinator.group_hashes(request.chain, group)
        for first in range(0, len(own), manager.chunk_blocks):
            whole = min(manager.chunk_blocks, len(own) - first)
            is_whole = draw(st.integers(0, density)) > 0
            count = whole if is_whole else draw(st.integers(0, whole))
            if not count:
                continue
            run = own[first : first + count]
            parent = own[first - 1] if first else CHAIN_ROOT
            assert books.storage.tiers[0].adopt(
                ObjectName(group, parent, b"".join(run), manager.members)
            )
            present |= {
                (kv_group, name) for kv_group in manager.attention.kv_groups for name in run
            }
    return present


@st.composite
def draft_models(draw: st.DrawFn) -> Model:
    """Models of which some kv groups are a draft model's, as vLLM marks them."""
    specs: list[KVCacheSpec] = [full(), full()]
    if draw(st.booleans()):
        specs.append(window(sliding_window=draw(st.integers(2, 9 * UNIT))))
    if draw(st.booleans()):
        specs.append(window(sliding_window=5 * UNIT, head_size=8))
    model = model_of(specs)
    for group in model.config.kv_cache_groups:
        group.is_eagle_group = draw(st.booleans())
    return model._replace(layout=AttentionLayout(_attention_groups(NO_SPECULATION, model.config)))


def vllm_hit(model: Model, present: set[tuple[int, bytes]], hashes: list[bytes], most: int) -> int:
    """The longest hit of vLLM's coordinator over a pool that holds `present`. Tokens."""
    coordinator = HybridKVCacheCoordinator(
        model.config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=model.alignment,
        hash_block_size=model.layout.hash_block_tokens,
        allow_partial_hash_hits=False,
    )
    pool = Pool(present, model.layout.hash_block_tokens)
    for manager in coordinator.single_type_managers:
        manager.block_pool = pool
    return int(coordinator.find_longest_cache_hit(hashes, most)[1])


@st.composite
def scenes(
    draw: st.DrawFn, kinds: st.SearchStrategy[Model]
) -> tuple[Model, OpalKVCacheManager, list[bytes], int, int]:
    """A model, filled books, a sequence of so many tokens, and what vLLM would hit of it."""
    model = draw(kinds)
    books = books_of(model)
    token_count = draw(st.integers(1, MOST_UNITS * UNIT))
    chain = books.database.chain()
    chain.extend(TOKENS[:token_count])
    present = fill(draw, model, books, chain.hashes)
    hit = vllm_hit(model, present, chain.hashes, token_count - 1)
    return model, books, chain.hashes, token_count, hit


def test_dense_models_keep_their_coordinator() -> None:
    """One group of full attention is not folded: nothing is spent on what a dense model lacks."""
    dense = model_of([full()])
    assert isinstance(books_of(dense).coordinator, Unitary)
    assert isinstance(books_of(model_of([window()])).coordinator, Hybrid)
    assert isinstance(books_of(model_of([full(), full()])).coordinator, Hybrid)


@settings(max_examples=250, deadline=None)
@given(scene=scenes(models()))
def test_lengths_are_those_of_vllm(
    scene: tuple[Model, OpalKVCacheManager, list[bytes], int, int],
) -> None:
    """The longest length that all groups serve is the one that vLLM's coordinator finds."""
    model, books, hashes, token_count, expected = scene
    request = books.new_request("lookup")
    request.chain.hashes.extend(hashes)

    plan = books.coordinator.find_hit(
        request.chain,
        computed_blocks=0,
        max_blocks=(token_count - 1) // model.layout.hash_block_tokens,
    )

    assert plan.block_count * model.layout.hash_block_tokens == expected


@settings(max_examples=150, deadline=None)
@given(scene=scenes(draft_models()))
def test_lengths_of_draft_models_are_those_of_vllm(
    scene: tuple[Model, OpalKVCacheManager, list[bytes], int, int],
) -> None:
    """A draft's groups must have one block more than the hit, which is computed again."""
    test_lengths_are_those_of_vllm.hypothesis.inner_test(scene)  # type: ignore[attr-defined]


def real_manager(model: Model) -> KVCacheManager:
    return KVCacheManager(
        model.config,
        max_model_len=4096,
        scheduler_block_size=model.alignment,
        hash_block_size=model.layout.hash_block_tokens,
    )


def real_request(model: Model, name: str, token_count: int) -> Request:
    init_none_hash(sha256)
    return Request(
        name,
        TOKENS[:token_count],
        SamplingParams(max_tokens=4),
        None,
        block_hasher=get_request_block_hasher(model.layout.hash_block_tokens, sha256),
    )


@settings(max_examples=150, deadline=None)
@given(scene=scenes(models(most_extra_tokens=40)), local_units=st.integers(0, MOST_UNITS))
def test_loads_fill_what_vllm_allocates(
    scene: tuple[Model, OpalKVCacheManager, list[bytes], int, int], local_units: int
) -> None:
    """The load plan names exactly the blocks that are not null and not local, and misses none."""
    model, books, hashes, token_count, _ = scene
    manager = real_manager(model)
    local_tokens = min(local_units * UNIT, token_count - 1)
    if local_tokens > UNIT:
        former = real_request(model, "former", local_tokens)
        manager.allocate_slots(former, local_tokens)
        manager.free(former)
    request = real_request(model, "now", token_count)
    computed_blocks, computed, _ = manager.get_computed_blocks(request)
    assume(computed % model.alignment == 0)
    opal = books.new_request("now")
    opal.chain.hashes.extend(hashes)
    block_tokens = model.layout.hash_block_tokens
    result = books.lookup(
        opal,
        computed_blocks=computed // block_tokens,
        max_blocks=(token_count - 1) // block_tokens,
        now=0.0,
    )
    assume(result.block_count > 0)
    length = computed + result.block_count * block_tokens

    manager.allocate_slots(
        request,
        0,
        num_new_computed_tokens=computed,
        new_computed_blocks=computed_blocks,
        num_external_computed_tokens=length - computed,
        delay_cache_blocks=True,
    )
    tables = manager.get_block_ids("now")
    job = books.plan_load(
        opal,
        BlockTables(tables, group_stride=POOL_BLOCKS, null_block=0),
        first_block=computed // block_tokens,
        block_count=result.block_count,
    )

    wanted = {
        kv_group * POOL_BLOCKS + block_id
        for attention in model.layout.groups
        for kv_group in attention.kv_groups
        for block_id in tables[kv_group][computed // attention.block_tokens :]
        if block_id
    }
    filled = [address for item in job.objects for address in item.block_ids]
    assert len(filled) == len(set(filled))
    assert set(filled) == wanted
    assert job.missing_block_ids == ()
    assert sum(result.tier_tokens.values()) == length - computed
    books.check()


@pytest.mark.parametrize(
    ("specs", "token_count", "blocks"),
    [
        # Chunks of 128: at a multiple of it nothing of the chunked group is needed.
        ([full(), chunked(attention_chunk_size=128)], 257, [8, 0]),
        ([full(), chunked(attention_chunk_size=128)], 300, [9, 1]),
        # A window of 65 looks at three blocks from the end of a block, one of 2 at one.
        ([full(), window(sliding_window=66)], 257, [8, 3]),
        ([full(), window(sliding_window=2)], 257, [8, 1]),
        ([full(), window(sliding_window=1)], 257, [8, 0]),
        ([full(), mamba(page_size_padded=None)], 257, [8, 1]),
    ],
)
def test_blocks_by_kind(specs: list[KVCacheSpec], token_count: int, blocks: list[int]) -> None:
    """How many blocks of each group a load brings when everything is there."""
    model = model_of(specs)
    books = books_of(model)
    chain = books.database.chain()
    chain.extend(TOKENS[:token_count])
    for group, manager in enumerate(books.coordinator.managers):
        own = books.coordinator.group_hashes(chain, group)
        for first in range(0, len(own), manager.chunk_blocks):
            run = b"".join(own[first : first + manager.chunk_blocks])
            parent = own[first - 1] if first else CHAIN_ROOT
            books.storage.tiers[0].adopt(ObjectName(group, parent, run, manager.members))

    plan = books.coordinator.find_hit(
        chain, computed_blocks=0, max_blocks=(token_count - 1) // UNIT
    )

    brought = [0] * len(model.layout.groups)
    for segment in plan.segments:
        brought[segment.record.group] += segment.block_count
    assert brought == blocks
