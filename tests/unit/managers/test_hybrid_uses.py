"""What the use of a sequence keeps fresh of windows and states, and what it lets go."""

from hybrid_world import (
    begin,
    full,
    hybrid_manager,
    layout_of,
    look,
    mamba,
    plan,
    store,
    tables_of,
    window,
)

from opal_connector.managers import OpalKVCacheManager, StateBlock
from opal_connector.managers.single_type import SingleTypeManager
from opal_connector.transfers import FailureKind, JobResult

WINDOW = 1
TOKENS = [5000 + token for token in range(40)]


def books(rows: int = 400) -> OpalKVCacheManager:
    """Blocks of two tokens, a window of four: objects of two blocks."""
    return hybrid_manager(layout_of(full(2), window(4, 2)), rows=[rows], chunk_tokens=8)


def passing_units(manager: OpalKVCacheManager, tokens: list[int]) -> list[bool]:
    """Of the window's objects over these tokens, in their order, which would leave first."""
    hashes = begin(manager, tokens).chain.hashes
    index = manager.storage.tiers[0].index.records
    records = {record.run[-32:]: record for record in index.values() if record.group == WINDOW}
    return [records[hashes[stop - 1]].is_passing for stop in range(2, len(hashes) + 1, 2)]


def test_windows_of_an_answer_are_let_go_when_it_has_ended() -> None:
    """A resend needs the end of the prompt, the next turn that of the answer; nobody the rest."""
    manager = books()
    request = begin(manager, TOKENS[:16])
    manager.lookup(request, computed_blocks=0, max_blocks=7, now=1e9)  # as hosts do
    for tokens in range(16, 41, 4):
        request.extend(TOKENS[:tokens])
        job = plan(manager, request)
        assert job is not None
        manager.commit(JobResult(job.job_id, 0))
    assert passing_units(manager, TOKENS) == [True, True] + [False] * 8

    manager.end_request(request)

    kept = [place for place, passing in enumerate(passing_units(manager, TOKENS)) if not passing]
    assert kept == [2, 3, 8, 9]
    manager.check()


def test_what_somebody_used_is_not_let_go_by_who_stored_it() -> None:
    """Another request went on from the middle of an answer while it was being written."""
    manager = books()
    writer = begin(manager, TOKENS[:16], "writer")
    look(manager, writer)
    writer.extend(TOKENS[:32])
    job = plan(manager, writer)
    assert job is not None
    manager.commit(JobResult(job.job_id, 0))
    reader = begin(manager, TOKENS[:24], "reader")
    assert look(manager, reader) == 24
    load = manager.plan_load(reader, tables_of(manager, 24), first_block=0, block_count=12)
    manager.commit(JobResult(load.job_id, 0))
    writer.extend(TOKENS)
    job = plan(manager, writer)
    assert job is not None
    manager.commit(JobResult(job.job_id, 0))

    manager.end_request(writer)

    assert passing_units(manager, TOKENS)[5] is False
    manager.end_request(reader)
    manager.check()


def test_window_where_requests_go_on_is_as_fresh_as_their_chain() -> None:
    """Also for those that have it on the device already and load nothing."""
    manager = books()
    store(manager, TOKENS[:16])
    sibling = begin(manager, [*TOKENS[:8], *range(8)])
    manager.lookup(sibling, computed_blocks=4, max_blocks=8, now=1e9)

    keys = manager.coordinator.chain_keys(sibling.chain, sibling.joins)

    windows = {key for key in keys if key.endswith(WINDOW.to_bytes(2, "little"))}
    needed = sibling.chain.hashes[3] + WINDOW.to_bytes(2, "little")
    assert needed in windows
    assert sibling.chain.hashes[1] + WINDOW.to_bytes(2, "little") not in windows


def test_states_are_planned_whatever_else_is_in_flight() -> None:
    """VLLM offers a state once; chunks come again."""
    manager = hybrid_manager(layout_of(full(2), mamba(2, 1)), rows=[64], chunk_tokens=8)
    request = begin(manager, TOKENS[:8])

    job = manager.plan_store(
        request,
        full_blocks=4,
        tables=tables_of(manager, 8),
        include_tail=True,
        states=[StateBlock(1, 9, 8)],
        max_blocks=0,
    )

    assert job is not None
    assert [item.group for item in job.objects] == [1]
    assert request.drop_reason == "in_flight"


def test_loads_that_brought_nothing_are_counted() -> None:
    """The host stops to try what fails again and again: where a part is no use, nothing is won."""
    manager = books()
    store(manager, TOKENS[:16])
    reader = begin(manager, TOKENS[:16], "reader")
    for attempt in range(1, 4):
        assert look(manager, reader) == 16
        tables = tables_of(manager, 16, is_nulled=True)
        load = manager.plan_load(reader, tables, first_block=0, block_count=8)
        assert not load.missing_block_ids
        last = len(load.objects) - 1
        manager.commit(JobResult(load.job_id, 0, {last: FailureKind.TIMEOUT}))
        assert reader.failed_loads == attempt
    assert not any(reader.hit_tokens.values())


def test_window_that_is_shorter_than_an_alignment_has_objects_that_fit_into_it() -> None:
    """Else a step of a few tokens would find their first blocks gone, and nothing was stored."""
    layout = layout_of(full(8), window(4, 2))
    manager: SingleTypeManager = hybrid_manager(
        layout, rows=[64], chunk_tokens=16
    ).coordinator.managers[WINDOW]
    assert manager.chunk_blocks * manager.attention.block_tokens == 4


def test_a_load_that_the_host_takes_for_failed_counts_as_one() -> None:
    """It has a block that nobody promised: tried again without a count, it would be for ever."""
    manager = books()
    store(manager, TOKENS[:24])
    request = begin(manager, TOKENS[:24])
    for turn in range(3):
        assert request.failed_loads == turn
        hit_tokens = look(manager, request)
        assert hit_tokens
        wanted = tables_of(manager, hit_tokens)  # all blocks, of the window too
        job = manager.plan_load(request, wanted, first_block=0, block_count=hit_tokens // 2)
        assert job.missing_block_ids
        manager.commit(JobResult(job.job_id, 0))
    assert request.hit_tokens == {}
    manager.check()
