"""Wrong bytes served: the first kind of reported fault, against the real scheduler.

Free device blocks are overwritten after every step, and every KV byte changes the output.
"""

import pytest

pytest.importorskip("vllm")

from engine_without_model import Engine
from transfer_fakes import FailingTier, flip_bit
from vllm_parts import prompt

pytestmark = pytest.mark.vllm


def tokens_of_hit(engine: Engine, request_id: str) -> list[int | None]:
    return [lookup.matched_tokens for lookup in engine.lookups if lookup.request_id == request_id]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ht_01_store_that_runs_late_keeps_the_bytes_of_its_step(prefix_caching: bool) -> None:
    """A store that begins after the request's end reads what the request computed."""
    engine = Engine(transfers="manual", num_blocks=9, prefix_caching=prefix_caching)
    engine.answer("a", prompt(1, 64), max_tokens=1)
    late = engine.mover().pending_stores
    held = [block_id for item in late[0].objects for block_id in item.block_ids]
    snapshot = [engine.runner.block_bytes(0, block_id) for block_id in held]

    for seed in range(2, 6):  # more than the rest of the device, one after the other
        engine.answer(f"other{seed}", prompt(seed, 60), max_tokens=1)
        engine.mover().run([job for job in engine.mover().pending if job not in late])
    now = [engine.runner.block_bytes(0, block_id) for block_id in held]
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()
    engine.forget_device()
    again = engine.generate("again", [*prompt(1, 64), 7], max_tokens=4)

    assert now == snapshot
    assert again.hit_tokens == 64
    engine.assert_answers("again")
    engine.assert_idle()


def test_ht_03_preempted_request_is_stored_with_its_own_bytes() -> None:
    """A store that outlives its request's preemption is not poisoned by the blocks' next owner."""
    engine = Engine(transfers="manual", num_blocks=9, batch_tokens=128)
    engine.add("a", prompt(1, 60), max_tokens=30)
    engine.add("b", prompt(2, 60), max_tokens=30)
    engine.run_until(lambda: engine.requests["b"].num_preemptions > 0)
    assert engine.mover().pending_stores

    engine.run_until(lambda: engine.run_transfers() == 0)
    engine.mover().is_inline = True
    engine.run()
    engine.forget_device()
    for name, seed in (("again_a", 1), ("again_b", 2)):
        engine.generate(name, prompt(seed, 60), max_tokens=30)
        assert engine.results[name].hit_tokens == 48

    engine.assert_answers("a", "b", "again_a", "again_b")
    engine.assert_idle()


def test_ht_03_failed_store_is_not_taken_for_present() -> None:
    """A store that failed leaves nothing behind: the same prefix is stored the next time."""
    engine = Engine(wrap_tier=FailingTier)
    engine.tier().fails_write = lambda item: True
    engine.generate("first", prompt(1, 64))
    assert engine.held_hashes() == set()

    engine.tier().fails_write = lambda item: False
    engine.forget_device()
    engine.generate("second", prompt(1, 64))
    engine.forget_device()
    third = engine.generate("third", prompt(1, 64))

    assert third.hit_tokens == 48
    engine.assert_answers("first", "second", "third")
    engine.assert_idle()


def test_ht_04_block_under_a_pending_store_is_handed_to_nobody() -> None:
    """An allocation without a hit (`num_external_tokens` 0) gets no block that a store reads."""
    engine = Engine(transfers="manual", num_blocks=9, prefix_caching=False)
    engine.answer("a", prompt(1, 64), max_tokens=1)
    (store,) = engine.mover().pending_stores
    held = {block_id for item in store.objects for block_id in item.block_ids}
    assert len(held) == 4

    engine.add("small", prompt(2, 50), max_tokens=2)  # the four other blocks
    engine.step()
    assert not held & set(engine.block_ids("small"))
    engine.add("large", prompt(3, 100), max_tokens=2)  # seven blocks: must wait for the store
    for _ in range(5):
        engine.step()
        assert engine.requests["large"].num_computed_tokens == 0
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    assert engine.generate("again", [*prompt(1, 64), 7]).hit_tokens == 64
    engine.assert_answers("small", "large", "again")
    engine.assert_idle()


@pytest.mark.parametrize("failed_chunk", [0, 2, 4])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_ht_07_failed_chunk_and_all_behind_it_are_reported(failed_chunk: int, policy: str) -> None:
    """Exactly the blocks from the failed chunk on are load errors; the request knows."""
    engine = Engine(policy=policy, wrap_tier=FailingTier, transfers="manual")
    engine.mover().is_inline = True
    engine.generate("cold", prompt(1, 170))
    engine.forget_device()
    engine.mover().is_inline = False
    engine.add("warm", prompt(1, 170), max_tokens=5)
    engine.step()
    (load,) = engine.mover().pending_loads
    assert len(load.objects) == 5
    engine.tier().bad_hashes = {load.objects[failed_chunk].stamps[-32:]}
    blocks = engine.block_ids("warm")
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    assert engine.load_errors == [set(blocks[2 * failed_chunk : 10])]
    warm = engine.results["warm"]
    if policy == "recompute":
        engine.assert_answers("warm")
        assert warm.hit_tokens == 32 * failed_chunk
    else:
        assert warm.finish_reason == "error"
        assert warm.tokens == []
    engine.tier().bad_hashes = set()
    engine.forget_device()
    again = engine.generate("again", prompt(1, 170), max_tokens=5)
    assert again.hit_tokens >= 32 * failed_chunk
    engine.assert_answers("again")
    engine.assert_idle()


def test_ht_09_object_being_loaded_is_not_evicted() -> None:
    """While a load of A is in flight nothing takes A's place; afterwards something may."""
    engine = Engine(transfers="manual", tier_blocks=4)
    engine.mover().is_inline = True
    engine.generate("a", prompt(1, 64), max_tokens=1)
    engine.forget_device()
    before = engine.held_hashes()
    engine.mover().is_inline = False
    engine.add("load_a", [*prompt(1, 64), 7], max_tokens=2)
    engine.step()
    assert engine.mover().pending_loads

    engine.add("b", prompt(2, 64), max_tokens=1)
    engine.run_until(lambda: engine.results["b"].finish_reason is not None)
    assert engine.held_hashes() == before
    assert not engine.mover().pending_stores
    assert engine.results["b"].stored_tokens == 0
    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()
    engine.assert_answers("load_a", "b")
    assert engine.results["load_a"].hit_tokens == 64

    engine.generate("c", prompt(3, 64), max_tokens=1)
    assert not engine.held_hashes() & before
    engine.assert_idle()


def test_ht_10_object_being_written_is_no_hit() -> None:
    """A second request that asks in the middle of a store is told to come again."""
    engine = Engine(transfers="manual", prefix_caching=False)
    engine.add("a", prompt(1, 64), max_tokens=1)
    engine.step()
    engine.add("b", [*prompt(1, 64), 7], max_tokens=3)
    for _ in range(10):
        engine.step()
    assert set(tokens_of_hit(engine, "b")) == {None}

    engine.mover().is_inline = True
    engine.run_transfers()
    engine.run()

    assert tokens_of_hit(engine, "b")[-1] == 64
    engine.assert_answers("a", "b")
    engine.assert_idle()


@pytest.mark.parametrize("local_tokens", [16, 256, 784, 960])
def test_ht_11_load_behind_a_local_hit_writes_no_local_block(local_tokens: int) -> None:
    """Where the device holds part of a chunk, a load begins behind it, to the byte."""
    engine = Engine(chunk_blocks=16, num_blocks=200, batch_tokens=1024)
    engine.generate("cold", prompt(1, 1000), max_tokens=1)
    engine.forget_device()
    engine.generate("local", prompt(1, local_tokens), max_tokens=1)
    local_blocks = local_tokens // 16
    engine.mover().is_inline = False
    engine.add("warm", prompt(1, 1000), max_tokens=1)
    engine.step()
    blocks = engine.block_ids("warm")
    engine.runner.trash(blocks[:local_blocks])  # a byte written there would show
    trashed = [engine.runner.block_bytes(0, block) for block in blocks[:local_blocks]]

    engine.run_transfers()

    assert [engine.runner.block_bytes(0, block) for block in blocks[:local_blocks]] == trashed
    assert engine.lookups[-1].computed_tokens == local_tokens
    assert engine.lookups[-1].matched_tokens == 992 - local_tokens
    loaded = engine.runner.prefix_blocks(prompt(1, 992))[local_blocks:]
    assert [engine.runner.block_bytes(0, block) for block in blocks[local_blocks:62]] == loaded


@pytest.mark.parametrize("length", range(33, 66, 4))
def test_ht_14_hit_ends_at_a_block(length: int) -> None:
    """However many tokens are stored, the answer is whole blocks and leaves one token."""
    engine = Engine()
    engine.generate("cold", prompt(1, 40), max_tokens=1)
    engine.forget_device()
    engine.generate("warm", prompt(1, length))

    assert tokens_of_hit(engine, "warm")[0] == min(32, (length - 1) // 16 * 16)
    engine.assert_answers("warm")


def test_ht_15_every_rank_stores_and_loads_its_shard() -> None:
    """Nothing is a hit, and no load has ended, before the last rank says so."""
    engine = Engine(ranks=2, transfers="manual", prefix_caching=False)
    engine.add("cold", prompt(1, 64), max_tokens=1)
    engine.step()
    engine.mover(0).run()
    engine.step()
    assert engine.held_hashes() == set()
    engine.mover(1).run()
    engine.step()
    assert len(engine.held_hashes()) == 4

    engine.add("warm", [*prompt(1, 64), 7], max_tokens=3)
    engine.step()
    engine.mover(1).run()
    for _ in range(3):
        engine.step()
        assert engine.requests["warm"].status.name == "WAITING_FOR_REMOTE_KVS"
    engine.mover(0).run()
    for rank in (0, 1):
        engine.mover(rank).is_inline = True
    engine.run()

    assert engine.results["warm"].hit_tokens == 64
    engine.assert_answers("cold", "warm")
    engine.assert_idle()


@pytest.mark.parametrize("rank", [0, 1])
def test_ht_15_failure_of_one_rank_is_a_failure_of_all(rank: int) -> None:
    """A shard that only one rank has lost is recomputed on both."""
    engine = Engine(ranks=2)
    engine.generate("cold", prompt(1, 100))
    engine.forget_device()
    engine.damage_chunk(prompt(1, 64), chunk=1, rank=rank)
    warm = engine.generate("warm", prompt(1, 100))

    assert warm.hit_tokens == 32
    engine.assert_answers("warm")
    engine.assert_idle()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_ht_15_rank_that_fails_first_does_not_end_the_load(policy: str, is_aborted: bool) -> None:
    """The blocks stay while the other rank still writes into them."""
    engine = Engine(ranks=2, transfers="manual", policy=policy, wrap_tier=FailingTier)
    for rank in (0, 1):
        engine.mover(rank).is_inline = True
    engine.generate("cold", prompt(1, 100))
    engine.forget_device()
    for rank in (0, 1):
        engine.mover(rank).is_inline = False
    engine.add("warm", prompt(1, 100))
    engine.step()
    blocks = set(engine.block_ids("warm"))
    engine.tier(1).fails_read = lambda item: True
    engine.mover(1).run()
    engine.step()
    assert engine.load_errors == [blocks]
    if is_aborted:
        engine.abort("warm")
    for _ in range(3):
        engine.step()
        free = {block.block_id for block in engine.pool.blocks if not block.ref_cnt}
        assert not free & blocks
    engine.tier(1).fails_read = lambda item: False
    for rank in (0, 1):
        engine.mover(rank).is_inline = True
    engine.run_transfers()
    engine.run()

    if policy == "recompute" and not is_aborted:
        engine.assert_answers("warm")
    else:
        assert engine.results["warm"].tokens == []
    engine.forget_device()
    engine.generate("again", prompt(1, 100))
    engine.assert_answers("again")
    engine.assert_idle()


@pytest.mark.parametrize("byte", [0, 511, 1023])
def test_ht_13_flipped_bit_is_a_miss_and_is_stored_again(byte: int) -> None:
    """Damage in memory is seen before it is used; the next store rewrites the object."""
    engine = Engine()
    engine.generate("cold", prompt(1, 100))
    engine.forget_device()
    before = engine.held_hashes()
    record = engine.record_of_chunk(prompt(1, 64), chunk=1)
    flip_bit(engine.tier().rows, record.rows[0], byte=byte)
    warm = engine.generate("warm", prompt(1, 100))
    assert warm.hit_tokens == 32
    engine.forget_device()
    again = engine.generate("again", prompt(1, 100))

    assert again.hit_tokens == 96
    assert engine.held_hashes() == before
    engine.assert_answers("warm", "again")
    engine.assert_idle()
