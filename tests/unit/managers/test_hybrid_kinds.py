"""What is particular to a kind of attention: encoder inputs, sinks, states, null blocks."""

import pytest
from hybrid_world import (
    GROUP_STRIDE,
    begin,
    full,
    hashes_of,
    hybrid_manager,
    layout_of,
    look,
    mamba,
    plan,
    store,
    tables_of,
    window,
)

from opal_connector.events import Insert
from opal_connector.keys import AttentionGroup, AttentionKind, encoder_input_hashes
from opal_connector.managers import (
    BlockTables,
    Hybrid,
    OpalKVCacheManager,
    OpalRequest,
    StateBlock,
    Unitary,
)
from opal_connector.transfers import FailureKind, JobResult, LoadJob, row_stamps

CROSS = AttentionGroup(kind=AttentionKind.CROSS, block_tokens=2)
INPUT_BLOCKS = 7
TOKENS = list(range(8))


# Cross attention.


def transcriber(*, save_unfull_chunk: bool = True) -> OpalKVCacheManager:
    """Books of a decoder that attends to what an encoder read."""
    return hybrid_manager(
        layout_of(full(2), CROSS),
        rows=[64],
        chunk_tokens=8,
        save_unfull_chunk=save_unfull_chunk,
    )


def heard(manager: OpalKVCacheManager, sound: str, tokens: list[int] = TOKENS) -> OpalRequest:
    """A request about that input."""
    request = begin(manager, tokens, sound)
    request.chain.input_hashes = encoder_input_hashes([sound], block_count=INPUT_BLOCKS)
    return request


def input_tables(tokens: int = 8) -> BlockTables:
    """Blocks of the decoder from 1 on, and of the whole input from 51 on."""
    own = list(range(1, tokens // 2 + 1))
    return BlockTables((own, list(range(51, 51 + INPUT_BLOCKS))), GROUP_STRIDE, 0)


def listen(manager: OpalKVCacheManager, sound: str, tokens: list[int] = TOKENS) -> None:
    """Store what a request about that input has."""
    request = heard(manager, sound, tokens)
    job = manager.plan_store(
        request, full_blocks=len(tokens) // 2, tables=input_tables(len(tokens)), include_tail=True
    )
    assert job is not None
    manager.commit(JobResult(job.job_id, 0))
    manager.end_request(request)
    manager.check()


def filled(job: LoadJob, kv_group: int) -> dict[int, bytes]:
    """The blocks of a kv group that a load fills, and by what name."""
    return {
        address - kv_group * GROUP_STRIDE: stamp
        for item in job.objects
        for address, stamp in zip(item.block_ids, hashes_of(item.stamps), strict=True)
        if address // GROUP_STRIDE == kv_group
    }


@pytest.mark.parametrize("save_unfull_chunk", [True, False])
def test_whole_input_is_stored_with_the_first_tokens_and_loaded_with_a_short_hit(
    save_unfull_chunk: bool,
) -> None:
    """It is longer than the text, and any length of text needs all of it, its tail too."""
    manager = transcriber(save_unfull_chunk=save_unfull_chunk)
    listen(manager, "a")
    reader = heard(manager, "a")
    assert look(manager, reader) == 8

    job = manager.plan_load(reader, input_tables(), first_block=0, block_count=4)

    stamps = (row_stamps(name, 1, group=1) for name in reader.chain.input_hashes)
    wanted = dict(enumerate(stamps, start=51))
    assert filled(job, 1) == wanted
    assert sorted(filled(job, 0)) == [1, 2, 3, 4]
    assert job.missing_block_ids == ()


def test_same_text_about_another_input_is_no_hit() -> None:
    """What the decoder has of the text depends on what it heard: nothing of it is used."""
    manager = transcriber()
    listen(manager, "a")

    assert look(manager, heard(manager, "b")) == 0


def test_part_of_an_input_is_worth_nothing() -> None:
    """One object of it missing is all of it missing, until it is stored again."""
    manager = transcriber()
    listen(manager, "a")
    (tier,) = manager.storage.tiers
    tail = next(
        record for record in tier.index.records.values() if record.group and record.block_count == 3
    )
    manager.storage.remove(tail.key)
    assert look(manager, heard(manager, "a")) == 0

    listen(manager, "a")

    assert look(manager, heard(manager, "a")) == 8


def test_input_that_the_host_has_is_not_loaded_again() -> None:
    """Where text is computed, its input is there: only more text is of use."""
    manager = transcriber()
    listen(manager, "a")
    reader = heard(manager, "a")
    for key in manager.coordinator.chain_keys(reader.chain):
        if key.endswith((1).to_bytes(2, "little")):
            manager.storage.remove(key)

    result = manager.lookup(reader, computed_blocks=2, max_blocks=4, now=1e9)

    assert result.block_count == 2
    job = manager.plan_load(reader, input_tables(), first_block=2, block_count=2)
    assert (sorted(filled(job, 0)), filled(job, 1)) == ([3, 4], {})
    assert job.missing_block_ids == ()


def test_all_of_an_input_is_asked_for() -> None:
    """A shared tier may have it, however short the text is that would be hit."""
    manager = transcriber()
    request = heard(manager, "a")

    names = manager.coordinator.unknown_names(request.chain, stop_block=0, max_blocks=2)

    asked = {name.run for name in names.singles if name.group == 1}
    hashes = request.chain.input_hashes
    assert {b"".join(hashes[:4]), b"".join(hashes[4:])} <= asked


def test_input_tells_no_tokens() -> None:
    """Its blocks stand for no tokens of the sequence: events must not say so."""
    manager = transcriber()
    request = heard(manager, "a")
    job = manager.plan_store(
        request, full_blocks=4, tables=input_tables(), include_tail=True, tokens=TOKENS
    )
    assert job is not None
    manager.commit(JobResult(job.job_id, 0))

    told = [
        (event.fact.group, event.token_ids)
        for event in manager.take_events()
        if isinstance(event, Insert)
    ]
    assert sorted(told) == [(0, tuple(TOKENS)), (1, ()), (1, ())]


# Sinks.


def test_sinks_alone_are_served_like_full_attention() -> None:
    """They belong to the model, not to a sequence: every block is cached as it is."""
    sink = AttentionGroup(kind=AttentionKind.SINK, block_tokens=2, span_tokens=4)
    manager = hybrid_manager(layout_of(sink), rows=[16], chunk_tokens=4)
    assert isinstance(manager.coordinator, Unitary)

    store(manager, TOKENS)

    assert look(manager, begin(manager, [*TOKENS, 9, 9])) == 8
    assert look(manager, begin(manager, [*TOKENS[:5], 9, 9])) == 4


def test_sinks_beside_a_window_bound_the_hit() -> None:
    """The chain of the sinks is needed from the first block on, the window at the end only."""
    sink = AttentionGroup(kind=AttentionKind.SINK, block_tokens=2)
    manager = hybrid_manager(layout_of(sink, window(4, 2)), rows=[64], chunk_tokens=4)
    assert isinstance(manager.coordinator, Hybrid)
    tokens = list(range(12))
    store(manager, tokens)
    first = next(
        record
        for record in manager.storage.tiers[0].index.records.values()
        if record.group == 1 and record.is_passing
    )
    manager.storage.remove(first.key)

    assert look(manager, begin(manager, tokens)) == 12


# Null blocks and states.


def test_what_the_host_has_no_more_is_left_out() -> None:
    """Behind a window there is only the null block: its objects are not stored, all others are."""
    manager = hybrid_manager(layout_of(full(2), window(4, 2, 2)), rows=[64], chunk_tokens=8)
    request = begin(manager, list(range(16)))

    job = plan(manager, request, is_nulled=True)

    assert job is not None
    stored = sorted(
        address // GROUP_STRIDE * 100 + address % GROUP_STRIDE
        for item in job.objects
        for address in item.block_ids
    )
    assert stored == [*range(1, 9), 107, 108, 207, 208]
    manager.commit(JobResult(job.job_id, 0))
    assert look(manager, begin(manager, list(range(16)))) == 16


def test_only_what_the_host_wants_is_loaded() -> None:
    """Blocks that it keeps null are not in the job, of each member by itself."""
    manager = hybrid_manager(layout_of(full(2), window(4, 2, 2)), rows=[64], chunk_tokens=8)
    store(manager, list(range(8)))
    reader = begin(manager, list(range(8)))
    assert look(manager, reader) == 8
    tables = BlockTables(
        ([1, 2, 3, 4], [0, 0, 0, 5], [0, 0, 6, 7]), group_stride=GROUP_STRIDE, null_block=0
    )

    job = manager.plan_load(reader, tables, first_block=0, block_count=4)

    hashes = reader.chain.hashes
    assert filled(job, 0) == dict(enumerate(hashes, start=1))
    assert {block: stamp[3:] for block, stamp in filled(job, 1).items()} == {5: hashes[3][3:]}
    assert {block: stamp[3:] for block, stamp in filled(job, 2).items()} == {
        6: hashes[2][3:],
        7: hashes[3][3:],
    }
    assert job.missing_block_ids == ()


def test_block_that_no_object_brings_is_named_as_missing() -> None:
    """Of every kv group, by its address: the host would use it as it is."""
    manager = hybrid_manager(layout_of(full(2), window(4, 2)), rows=[64], chunk_tokens=8)
    reader = begin(manager, list(range(8)))
    tables = BlockTables(([1, 2, 3, 4], [0, 0, 5, 6]), group_stride=GROUP_STRIDE, null_block=0)

    job = manager.plan_load(reader, tables, first_block=0, block_count=4)

    assert job.missing_block_ids == (1, 2, 3, 4, GROUP_STRIDE + 5, GROUP_STRIDE + 6)


def test_state_is_stored_when_all_of_its_members_are_handed_over() -> None:
    """Half a state continues nothing; a table does not say which state a block holds."""
    manager = hybrid_manager(layout_of(full(2), mamba(2, 2)), rows=[64], chunk_tokens=8)
    request = begin(manager, TOKENS)
    states = [StateBlock(1, 9, 4), StateBlock(2, 9, 4), StateBlock(1, 8, 6), StateBlock(2, 0, 6)]

    job = manager.plan_store(
        request, full_blocks=4, tables=tables_of(manager, 8), include_tail=True, states=states
    )

    assert job is not None
    of_states = [item for item in job.objects if item.group == 1]
    assert [item.block_ids for item in of_states] == [(GROUP_STRIDE + 9, 2 * GROUP_STRIDE + 9)]
    assert of_states[0].stamps[:32] == row_stamps(request.chain.hashes[1], 1, group=1)
    manager.commit(JobResult(job.job_id, 0))
    assert look(manager, begin(manager, TOKENS)) == 4


def test_unit_of_a_window_that_failed_is_stored_again() -> None:
    """A failed write is no object, and the next plan offers its blocks once more."""
    manager = hybrid_manager(layout_of(full(2), window(4, 2)), rows=[64], chunk_tokens=8)
    request = begin(manager, TOKENS)
    job = plan(manager, request)
    assert job is not None
    last = max(place for place, item in enumerate(job.objects) if item.group == 1)
    manager.commit(JobResult(job.job_id, 0, {last: FailureKind.IO}))
    assert look(manager, begin(manager, TOKENS)) < 8

    again = plan(manager, request)

    assert again is not None
    assert [item.stamps for item in again.objects] == [job.objects[last].stamps]
    manager.commit(JobResult(again.job_id, 0))
    assert look(manager, begin(manager, TOKENS)) == 8
