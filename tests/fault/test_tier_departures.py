"""What is out of the books and still on a medium: resets, deletions, and what was lost."""

from fakes import start
from tier_bench import FAR, NEAR, Bench
from tier_world import file_bytes, tiered_manager

from opal_connector.events import Copy, Delete, Insert, Move
from opal_connector.transfers import DropJob, FailureKind, JobResult, TierHealth

# Resets.


def test_ht_51_reset_holds_for_what_is_found_after_it() -> None:
    """A tier that is still being opened when all is emptied comes up empty."""
    first = Bench(memory=4, files=(8,), writes=("through",))
    first.store([1, 2, 3])
    first.rest()
    bench = Bench(memory=4, files=(8,), writes=("through",))
    bench.world.ranks[0].files = first.world.ranks[0].files
    bench.manager.report_health(0, [TierHealth.OK, TierHealth.OPENING])
    pages = bench.world.pages(NEAR, 0)
    again = tiered_manager(memory_blocks=4, file_tier_bytes=[8 * file_bytes(1)], writes=["through"])
    bench.manager = again
    bench.manager.reset()

    for page in pages:
        bench.manager.adopt(page)
    bench.rest()

    assert bench.look([1, 2, 3])[1] == 0
    assert bench.held(NEAR) == 0
    assert bench.used_blocks(NEAR) == 0
    assert bench.world.ranks[0].files[NEAR] == {}


def test_ht_51_store_after_a_reset_does_not_go_with_the_old_files() -> None:
    """Workers run jobs in any order: nothing is written while a directory is emptied."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1, 2, 3])
    bench.manager.reset()
    new = bench.plan([4, 5, 6])
    wipe = bench.upkeep()
    assert [job.is_wipe for job in wipe.drops] == [True]
    bench.world.hand_over(new)
    bench.work()  # the store is done before the directory is emptied
    bench.world.hand_over(wipe)
    bench.work()

    kept = {
        (place, key)
        for place, tier in enumerate(bench.manager.storage.tiers)
        for key in tier.index.readable_keys()
        if place
    }
    there = bench.world.ranks[0].files[NEAR]
    assert len(kept) == len(there)
    bench.rest()
    bench.store([4, 5, 6])
    bench.rest()
    assert bench.look([4, 5, 6])[1] == 3


def test_ht_51_emptying_that_fails_is_tried_again() -> None:
    """Until a directory is empty nothing is written there, and what was there stays charged."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1, 2, 3])
    bench.manager.reset()
    bench.world.hand_over(bench.upkeep())
    bench.work(FailureKind.IO)
    assert bench.used_blocks(NEAR) == 2
    bench.store([1, 2, 3])
    assert bench.held(NEAR) == 0

    again = bench.upkeep()

    assert [job.is_wipe for job in again.drops] == [True]
    bench.world.hand_over(again)
    bench.work()
    assert bench.used_blocks(NEAR) == 0
    bench.rest()
    bench.store([1, 2])
    assert bench.look([1, 2])[1] == 2


def test_write_that_ends_after_a_reset_does_not_come_back() -> None:
    """A store and a copy that were in flight: neither is announced, and their files go."""
    bench = Bench(memory=2, files=(8, 8), writes=("through", "through"))
    bench.store([1, 2])
    copies = bench.upkeep()
    late = bench.plan([3, 4, 5, 6])
    bench.manager.reset()
    before = len(bench.events)
    bench.world.hand_over(copies)
    bench.world.hand_over(late)
    bench.work()

    assert not [e for e in bench.events[before:] if isinstance(e, Insert | Copy | Move)]
    bench.rest()
    assert bench.contents == {}
    assert [bench.used_blocks(place) for place in range(3)] == [0, 0, 0]
    assert bench.world.ranks[0].files == {NEAR: {}, FAR: {}}


# What is on the medium and in no index.


def test_drop_that_fails_is_retried_and_stays_charged() -> None:
    """Bytes are free when the file is gone, not when somebody wanted it gone."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1, 2, 3])
    bench.rest()
    tier = bench.manager.storage.tiers[NEAR]
    for key in tier.index.readable_keys():
        tier.remove(key)
    bench.manager.report_health(0, [TierHealth.OK] * 2)
    bench.world.hand_over(bench.upkeep())
    bench.work(FailureKind.IO)  # the first of three
    assert bench.used_blocks(NEAR) == 1
    for _ in range(3):
        assert not bench.upkeep().drops  # not in a circle, but with the next one
    bench.store([5, 6])
    tier.remove(tier.index.readable_keys()[0])
    bench.rest()

    assert bench.used_blocks(NEAR) == bench.held(NEAR)
    assert len(bench.world.ranks[0].files[NEAR]) == bench.held(NEAR)


def test_nothing_is_written_under_a_name_that_is_being_deleted() -> None:
    """The deletion of the old file could take the new one with it."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1, 2])
    tier = bench.manager.storage.tiers[NEAR]
    (key,) = tier.index.readable_keys()
    tier.remove(key)
    drops = bench.upkeep()

    bench.store([1, 2])
    assert bench.look([1, 2])[1] == 1
    bench.world.hand_over(drops)
    bench.work()
    bench.store([1, 2])
    bench.rest()

    assert bench.look([1, 2])[1] == 2


def test_ht_51_files_removed_by_others_are_given_back() -> None:
    """Five times: ten stored, all removed behind our back; ten more fit each time."""
    bench = Bench(memory=1, files=(11,), writes=("through",), threshold=1.0)
    for round_number in range(5):
        first = 100 * round_number
        for number in range(first, first + 10):
            bench.store([number])
            bench.rest()
        files = bench.world.ranks[0].files[NEAR]
        assert len(files) == bench.held(NEAR) >= 10
        assert bench.used_blocks(NEAR) == len(files)
        bench.world.ranks[0].lost[NEAR] |= set(files)
        files.clear()
        for number in range(first, first + 10):
            bench.world.hand_over(bench.load([number]))
            bench.work()
        bench.rest()
        assert bench.used_blocks(NEAR) == 0


def test_ht_13_quarantined_file_is_rewritten_by_the_next_store() -> None:
    """Damage is a miss once: DELETE, the file goes, and the same chunk is stored anew."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1])
    bench.rest()
    bench.store([2])  # 1 leaves memory
    bench.rest()
    files = bench.world.ranks[0].files[NEAR]
    chunk = start(bench.manager, [1]).chain.hashes[0]
    (name,) = [name for name in files if name.chunk_hash == chunk]
    files[name] = False
    before = len(bench.events)
    bench.world.hand_over(bench.load([1]))
    bench.work()
    assert [e.tier for e in bench.events[before:] if isinstance(e, Delete)][-1:] == ["near"]
    # Once for the load, once for the copy that it was to leave in memory.
    assert bench.manager.take_counters()["failures"] == {"checksum": 2}
    bench.rest()
    assert name not in files

    bench.store([1])
    bench.rest()

    assert files[name] is True
    assert bench.look([1])[1] == 1


def test_drop_job_of_a_wipe_names_all_that_it_frees() -> None:
    """Its answer frees exactly what was leaving when it was planned."""
    bench = Bench(memory=1, files=(8,), writes=("through",))
    bench.store([1, 2, 3])
    bench.manager.reset()
    (job,) = bench.upkeep().drops
    assert isinstance(job, DropJob)
    bench.manager.commit(JobResult(job.job_id, 0))
    bench.work()

    assert bench.used_blocks(NEAR) == 0
