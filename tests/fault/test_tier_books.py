"""Several tiers, as the books see them: what leaves, what is said, what a load can count on."""

from pathlib import Path

import pytest
from fakes import plan_load, stamp, start
from tier_bench import FAR, NEAR, Bench, kinds
from tier_world import file_bytes, tiered_manager

from opal_connector.config import LocalNVMeConfig
from opal_connector.events import Copy, Move
from opal_connector.keys import CHAIN_ROOT
from opal_connector.tiers import allocate_host_rows, make_keyed_tier
from opal_connector.tiers import file_bytes as object_bytes
from opal_connector.tiers.checks import row_check
from opal_connector.transfers import (
    FailureKind,
    InventoryPage,
    JobBatch,
    JobResult,
    ObjectName,
    TierHealth,
)

# What leaves, and how much.


def test_ht_57_only_what_is_missing_leaves() -> None:
    """Room for 8 of 10 and a store of 10: two leave."""
    bench = Bench(memory=10, writes=("off", "off"))
    bench.store([1, 2])

    bench.store(range(50, 60))

    assert bench.held(0) == 10
    assert kinds(bench.events).count("Delete") == 2


def test_ht_57_demotions_in_flight_are_counted_before_more_is_demoted() -> None:
    """Steps that pass while a demotion is on its way must not send the next one after it."""
    bench = Bench(memory=10, files=(20,), writes=("demote",), threshold=0.9)
    for number in range(10):
        bench.store([number])
    moves = bench.upkeep()
    assert [len(job.objects) for job in moves.copies] == [2]
    for number in range(3):  # what happens meanwhile changes the books, and they plan again
        request, _ = bench.look([number])
        plan_load(bench.manager, request, [100])
        assert not bench.upkeep().copies
    bench.world.hand_over(moves)
    bench.work()

    assert bench.held(0) == 8


def test_ht_57_refused_wish_is_not_remembered_for_ever() -> None:
    """A store that found no room makes some once; the room that it never used stays in use."""
    bench = Bench(memory=2, files=(4, 40), writes=("through", "demote"), threshold=0.95)
    for first in range(0, 40, 2):
        bench.store([first, first + 1])
        bench.rest()

    assert bench.held(NEAR) >= 2
    assert bench.manager.storage.tiers[NEAR].levels.excess_bytes == 0


def test_demotion_takes_the_tail_before_the_head() -> None:
    """Of one prompt, what stays above is its beginning."""
    bench = Bench(memory=4, files=(8,), writes=("demote",), threshold=0.5)
    bench.store([1, 2, 3, 4])

    bench.rest()

    moved = [event.fact for event in bench.events if isinstance(event, Move)]
    chain = start(bench.manager, [1, 2, 3, 4]).chain.hashes
    assert [fact.chunk_hash for fact in moved] == chain[:1:-1][: len(moved)]
    assert len(moved) >= 2


def test_clean_eviction_writes_nothing() -> None:
    """What has a copy below leaves as a DELETE: nothing is written, and the copy stays."""
    bench = Bench(memory=4, files=(40,), writes=("through",), threshold=1.0)
    for number in range(4):
        bench.store([number])
        bench.rest()
    before = len(bench.events)

    bench.store([9])
    batches = bench.rest()

    assert kinds(bench.events[before:]) == ["Delete", "Insert", "Copy"]
    assert [len(job.objects) for batch in batches for job in batch.copies] == [1]
    assert bench.held(NEAR) == 5


def test_clean_demotion_writes_nothing() -> None:
    """Above a tier that is demoted to, what is there already goes at once."""
    bench = Bench(memory=4, files=(40, 40), writes=("through", "demote"), threshold=0.9)
    bench.store([0])
    bench.rest()
    for number in range(1, 4):
        bench.store([number])
        bench.rest()

    assert "Move" not in kinds(bench.events)
    assert bench.held(NEAR) == 4
    assert bench.held(0) < 4


def test_tier_that_does_not_answer_is_not_demoted_from() -> None:
    """Nobody could read what it holds: the copy would only make the next tier wait for it."""
    bench = Bench(memory=1, files=(4, 40), writes=("through", "demote"), threshold=0.9)
    for number in range(4):
        bench.store([number])
        bench.work()
        bench.world.hand_over(bench.upkeep())
        bench.work()
        if bench.held(NEAR) == 4:
            break
    bench.manager.report_health(0, [TierHealth.OK, TierHealth.SUSPENDED, TierHealth.OK])

    batch = bench.upkeep()

    assert not any(item.source_tier == NEAR for job in batch.copies for item in job.objects)


# Events.


def test_events_are_said_once_each() -> None:
    """A store, a copy, a move, a promotion and an eviction: each is one event of its kind."""
    bench = Bench(memory=2, files=(4, 8), writes=("demote", "through"), threshold=0.9)
    bench.store([1])
    bench.rest()
    assert kinds(bench.events) == ["Insert", "Copy"]
    bench.events.clear()
    for number in (2, 3):
        bench.store([number])
        bench.rest()

    said = [(type(event).__name__, event.fact.chunk_hash) for event in bench.events]
    assert len(set(said)) == len(said)
    assert kinds(bench.events).count("Insert") == 2
    bench.events.clear()
    bench.world.hand_over(bench.load([1]))
    bench.work()
    assert kinds(bench.events)[-1:] == ["Copy"]
    assert isinstance(bench.events[-1], Copy)
    assert bench.events[-1].target_tier == "memory"


def test_copy_of_a_child_waits_for_its_parent() -> None:
    """A child that is written before its parent is announced after it, and dropped without it."""
    bench = Bench(memory=4, files=(8,), writes=("through",))
    bench.store([1, 2])
    (copies,) = bench.upkeep().copies
    hashes = start(bench.manager, [1, 2]).chain.hashes
    assert [item.name.chunk_hash for item in copies.objects] == hashes
    bench.manager.storage.remove(bench.manager.storage.tiers[0].index.readable_keys()[0])
    bench.manager.commit(JobResult(copies.job_id, 0, {0: FailureKind.IO}))
    bench.work()

    assert bench.held(NEAR) == 0
    # The file of the child is deleted before its bytes count as free.
    assert bench.used_blocks(NEAR) == 2
    bench.rest()
    assert bench.used_blocks(NEAR) == 0


# Loads.


def test_ht_60_disk_hit_is_loaded_past_memory_that_is_pinned_full() -> None:
    """Memory that other loads hold entirely does not turn a hit below into a recompute."""
    bench = Bench(memory=2, files=(8,), writes=("through",), threshold=1.0)
    bench.store([1])
    bench.rest()
    for number in (2, 3):
        bench.store([number])
        bench.rest()
    held = [bench.load([2]), bench.load([3])]
    assert all(job.objects[0].tier == 0 for job in held)

    job = bench.load([1])

    assert [item.tier for item in job.objects] == [NEAR]
    assert job.objects[0].kept_rows == ()
    assert job.kept_job_id == 0
    assert job.missing_block_ids == ()
    for each in (job, *held):
        bench.world.hand_over(each)
    bench.work()
    assert bench.manager.open_job_count == 0


def test_kept_rows_of_a_load_that_was_given_up_are_freed_when_its_thread_returns() -> None:
    """Not before: it still writes there. And what it then brings is a copy like any other."""
    bench = Bench(memory=1, files=(8,), writes=("through",), threshold=1.0)
    bench.store([1])
    bench.rest()
    bench.store([2])
    bench.rest()
    job = bench.load([1])
    assert job.objects[0].kept_rows == (0,)
    bench.answer(job, FailureKind.TIMEOUT)
    bench.work()

    assert bench.plan([3]) is None or bench.manager.storage.tiers[0].used_bytes > 0
    row_owners = [record.rows for record in bench.manager.storage.tiers[0].index.records.values()]
    assert row_owners == [(0,)]
    bench.manager.commit(JobResult(job.kept_job_id, 0, {0: FailureKind.IO}))
    bench.work()
    assert bench.manager.storage.tiers[0].used_bytes == 0


def test_object_that_others_took_away_is_out_of_the_books_at_once() -> None:
    """GONE is a miss, a DELETE and nothing to hit again; other copies are as good as before."""
    bench = Bench(memory=1, files=(8, 8), writes=("through", "through"), threshold=1.0)
    bench.store([1])
    bench.rest()
    bench.store([2])
    bench.rest()
    files = bench.world.ranks[0].files[NEAR]
    files.clear()
    bench.world.hand_over(bench.load([1]))
    bench.work()
    bench.rest()

    again = bench.load([1])

    assert [item.tier for item in again.objects] == [FAR]


# Ranks.


def test_ht_63_only_what_every_rank_holds_is_a_hit_after_a_restart() -> None:
    """Rank 1 lost chunk 5 of 8: the agreed hit is 4, and the odd files are deleted."""
    first = Bench(memory=1, files=(16,), writes=("through",), ranks=2)
    first.store(range(1, 9))
    first.rest()
    chain = start(first.manager, range(1, 9)).chain.hashes
    bench = Bench(memory=1, files=(16,), writes=("through",), ranks=2)
    for rank, old in zip(bench.world.ranks, first.world.ranks, strict=True):
        rank.files = old.files
    del bench.world.ranks[1].files[NEAR][
        next(n for n in bench.world.ranks[1].files[NEAR] if n.chunk_hash == chain[4])
    ]
    bench.manager = tiered_manager(
        memory_blocks=1, file_tier_bytes=[16 * file_bytes(1)], writes=["through"], ranks=2
    )
    bench.open()
    bench.rest()

    assert bench.look(range(1, 9))[1] == 4
    there = [{name.chunk_hash for name in rank.files[NEAR]} for rank in bench.world.ranks]
    assert there[0] == there[1]


def test_ht_63_tier_that_one_rank_opens_twice_is_counted_once() -> None:
    """An opening that failed half-way and began again must not stand for the other rank."""
    first = Bench(memory=1, files=(8,), writes=("through",))
    first.store([1, 2, 3])
    first.rest()
    manager = tiered_manager(
        memory_blocks=1, file_tier_bytes=[8 * file_bytes(1)], writes=["through"], ranks=2
    )
    bench = Bench(memory=1, files=(8,), writes=("through",), ranks=2)
    bench.manager = manager
    half, rest = first.world.pages(NEAR, 0)
    everything = type(half)(NEAR, 0, (*half.names, *rest.names))
    for page in (everything, half, rest, type(rest)(NEAR, 1, is_last=True)):
        manager.adopt(page)
    bench.work()

    assert bench.held(NEAR) == 0


def test_what_others_have_on_a_disk_is_taken_off_once() -> None:
    """Every rank reports its share; the books are those of one rank, the worst off."""
    manager = tiered_manager(
        memory_blocks=1, file_tier_bytes=[8 * file_bytes(1)], writes=["through"], ranks=3
    )
    tier = manager.storage.tiers[NEAR]
    whole = tier.capacity_bytes
    for rank, foreign_bytes in ((1, 20), (0, 30)):
        manager.adopt(InventoryPage(NEAR, rank, is_last=True, foreign_bytes=foreign_bytes))
    assert tier.health is TierHealth.OPENING

    manager.adopt(InventoryPage(NEAR, 2, is_last=True, is_borrowed=True))

    assert tier.capacity_bytes == whole - 30


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_restart_of_ranks_on_one_disk_keeps_the_capacity(tmp_path: Path, ranks: int) -> None:
    """Three quarters full of the ranks' own objects: nothing of that is somebody else's."""
    row_bytes, limit_bytes = 4096, 4 << 20
    rows = allocate_host_rows(row_count=1, row_bytes=row_bytes)
    settings = LocalNVMeConfig(path=str(tmp_path), capacity_GB=f"{limit_bytes >> 20}MiB")
    count = 3 * limit_bytes // 4 // ranks // object_bytes(1, row_bytes)
    for is_again in (False, True):
        share_bytes = limit_bytes // ranks
        manager = tiered_manager(
            memory_blocks=1, file_tier_bytes=[share_bytes], writes=["through"], ranks=ranks
        )
        for rank in range(ranks):
            store, capacity_bytes = make_keyed_tier(
                "LocalNVMe", settings, row_bytes=row_bytes, rank=rank, local_ranks=ranks
            )
            assert capacity_bytes == share_bytes
            pages = list(store.open(bytes(32)))
            assert sum(map(len, pages)) == (count if is_again else 0)
            last = InventoryPage(NEAR, rank, is_last=True, foreign_bytes=store.foreign_bytes)
            for page in (*(InventoryPage(NEAR, rank, names) for names in pages), last):
                manager.adopt(page)
            for number in range(0 if is_again else count):
                name = ObjectName(0, CHAIN_ROOT, stamp(number))
                store.write_object(name, rows, [0], [row_check(rows[0], name.run, 0)])
            store.close()
        tier = manager.storage.tiers[NEAR]
        assert share_bytes - tier.capacity_bytes <= share_bytes // 8  # lock and index
        assert bool(tier.used_bytes) is is_again
        assert tier.used_bytes <= tier.capacity_bytes


# Full and failing tiers.


def test_ht_59_full_medium_sheds_stores_and_goes_on_loading() -> None:
    """ENOSPC is a state of its own, with its own failure: loads go on, stores when it ends."""
    bench = Bench(memory=1, files=(8,), writes=("through",), threshold=1.0)
    bench.store([1])
    bench.rest()
    store = bench.plan([7, 8])
    assert store is not None
    assert [item.tier for item in store.objects] == [0, NEAR]
    bench.manager.commit(JobResult(store.job_id, 0, {1: FailureKind.NO_SPACE}))
    bench.manager.report_health(0, [TierHealth.OK, TierHealth.NO_SPACE])
    bench.work()

    assert bench.manager.take_counters()["failures"] == {"no_space": 1}
    shed = bench.plan([7, 8])
    assert shed is None
    assert bench.manager.take_counters()["dropped_stores"] == {"full": 1}
    assert [item.tier for item in bench.load([1]).objects] == [NEAR]
    bench.manager.report_health(0, [TierHealth.OK] * 2)
    bench.rest()
    again = bench.plan([7, 8])
    assert again is not None
    assert {item.tier for item in again.objects} == {NEAR}


def test_ht_51_store_that_found_no_room_makes_some_even_if_nothing_else_happens() -> None:
    """A tier just below its threshold must not refuse every store from then on."""
    bench = Bench(memory=1, files=(4,), writes=("off",), threshold=1.0)
    space = bench.manager.storage.tiers[NEAR].space
    space.shrink(file_bytes(1) // 2)  # three and a half objects fit
    for number in (10, 20, 30, 40):
        bench.store([number, number + 1])
        bench.rest()
    busy, _ = bench.look([40])  # memory is promised: what is new can only go below
    for number in (45, 46):  # one more than there is room for
        bench.store([number])
    assert bench.manager.storage.tiers[NEAR].levels.excess_bytes > 0

    for number in (50, 60, 70):
        bench.store([number])  # refused, and the reason to make room
        bench.rest()
        bench.store([number])
        bench.rest()
        request, count = bench.look([number])
        bench.manager.release(request)
        assert count == 1
    bench.manager.release(busy)


def test_ht_57_store_that_is_refused_again_and_again_makes_room_once() -> None:
    """While the files of the victims are being deleted, a step's refusals must not add up."""
    bench = Bench(memory=1, files=(10,), writes=("off",), threshold=1.0)
    for number in range(10):  # besides one in memory
        bench.store([0, 100 + number])
        bench.work()
    busy, _ = bench.look([0])
    assert bench.held(NEAR) == 10
    drops = JobBatch()
    for _ in range(8):
        assert bench.plan([50]) is None
        drops = bench.upkeep() or drops
    bench.world.hand_over(drops)
    bench.work()
    bench.manager.release(busy)

    # Room for the one that was refused, down to the level at which eviction stops.
    assert bench.held(NEAR) == 8


def test_lookup_of_a_suspended_tier_is_a_miss_and_recovers() -> None:
    """What cannot be asked is not promised; when it answers again, nothing has been lost."""
    bench = Bench(memory=1, files=(8,), writes=("through",), threshold=1.0)
    bench.store([1])
    bench.rest()
    bench.store([2])
    bench.rest()
    bench.manager.report_health(0, [TierHealth.OK, TierHealth.SUSPENDED])
    assert bench.look([1])[1] == 0
    bench.manager.report_health(0, [TierHealth.OK] * 2)

    assert bench.look([1])[1] == 1


def test_ht_50_aborted_loads_leave_nothing_behind() -> None:
    """200 lookups and loads that are aborted at every point; the 201st still works."""
    bench = Bench(memory=2, files=(8,), writes=("through",), threshold=1.0)
    bench.store([1])
    bench.rest()
    for number in (2, 3):
        bench.store([number])
        bench.rest()
    for number in range(200):
        request, count = bench.look([1])
        assert count == 1
        if number % 3 == 0:
            bench.manager.release(request)
        elif number % 3 == 1:
            job = plan_load(bench.manager, request, [100])
            bench.answer(job, FailureKind.DROPPED)
            if job.kept_job_id:
                bench.manager.commit(JobResult(job.kept_job_id, 0, {0: FailureKind.DROPPED}))
        bench.manager.end_request(request)
        bench.work()
    assert (bench.manager.lease_count, bench.manager.open_job_count) == (0, 0)

    bench.world.hand_over(bench.load([1]))
    bench.work()

    assert bench.held(0) == 2
    assert bench.look([1])[1] == 1


def test_wishes_of_a_tier_that_is_away_are_kept() -> None:
    """Copies that a suspended tier misses are made when it is back."""
    bench = Bench(memory=4, files=(8,), writes=("through",), threshold=1.0)
    bench.manager.report_health(0, [TierHealth.OK, TierHealth.SUSPENDED])
    bench.store([1, 2])
    assert not bench.upkeep().copies
    bench.manager.report_health(0, [TierHealth.OK] * 2)
    bench.rest()

    assert bench.held(NEAR) == 2
