"""`OpalKVCacheEngine`: the three verbs over real books and a real memory tier, in one process."""

import runpy
import threading
from pathlib import Path

import numpy as np
import pytest

from opal_connector.config import ConfigError, load_config
from opal_connector.engine import OpalKVCacheEngine
from opal_connector.events import Delete, Insert
from opal_connector.keys import OpalCacheEngineKey, OpalEngineMetadata, RequestIdentity
from opal_connector.tiers import ArrayBlocks

BLOCK_TOKENS, ROW_BYTES, CHUNK_BLOCKS = 4, 256, 4


def make_engine(rows: int = 64, **config: object) -> OpalKVCacheEngine:
    paged = np.random.default_rng(1).integers(0, 256, (128, ROW_BYTES), dtype=np.uint8)
    extra = {
        "chunk_size": BLOCK_TOKENS * CHUNK_BLOCKS,
        "CPUMemory": {"capacity_GB": f"{rows * ROW_BYTES}B"},
        **config,
    }
    metadata = OpalEngineMetadata(
        weights_id="test",
        dtype="float32",
        kv_cache_dtype="float32",
        block_tokens=BLOCK_TOKENS,
        chunk_tokens=BLOCK_TOKENS * CHUNK_BLOCKS,
        group_page_bytes=(ROW_BYTES,),
    )
    return OpalKVCacheEngine(load_config(extra), metadata, ArrayBlocks(paged), with_events=True)


def blocks_of(engine: OpalKVCacheEngine) -> np.ndarray:
    return engine._paged.blocks


def test_a_tier_without_its_library_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence before any memory is taken."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tiers = {"kvc_tiers": ["CPUMemory", "Valkey"], "Valkey": {"url": "redis://host"}}
    with pytest.raises(ConfigError, match=r"'redis' is missing: pip install 'opal-connector\[val"):
        make_engine(**tiers)


def test_what_was_stored_comes_back_byte_for_byte() -> None:
    engine = make_engine()
    tokens = list(range(42))  # ten whole blocks: two chunks and a tail of two
    source, target = list(range(10)), list(range(50, 60))

    assert engine.store(tokens, source) == 40
    mask, tier_tokens = engine.retrieve(tokens, target)

    assert mask.tolist() == [True] * 40 + [False] * 2
    assert tier_tokens == {"CPUMemory": 40}
    assert (blocks_of(engine)[source] == blocks_of(engine)[target]).all()
    engine.manager.check()


def test_lookup_counts_only_what_lies_behind_the_computed_tokens() -> None:
    """HT-42: local 16, together 24 => 8."""
    engine = make_engine()
    tokens = list(range(24))
    engine.store(tokens, range(6))

    assert engine.lookup(tokens, num_computed_tokens=16) == (8, {"CPUMemory": 8})
    assert engine.lookup(tokens, num_computed_tokens=24) == (0, {})


def test_retrieve_does_not_touch_blocks_that_are_computed() -> None:
    """HT-11: a load behind a local hit inside a chunk writes no block below it."""
    engine = make_engine()
    tokens = list(range(64))
    engine.store(tokens, range(16))
    target = list(range(40, 56))
    before = blocks_of(engine)[target].copy()

    mask, _ = engine.retrieve(tokens, target, num_computed_tokens=24)

    assert mask.tolist() == [False] * 24 + [True] * 40
    assert (blocks_of(engine)[target[:6]] == before[:6]).all()
    assert (blocks_of(engine)[target[6:]] == blocks_of(engine)[6:16]).all()


def test_a_sibling_gets_the_blocks_it_shares_inside_a_chunk() -> None:
    engine = make_engine()
    engine.store(list(range(32)), range(8))
    sibling = [*range(24), 99, 98, 97, 96]

    assert engine.lookup(sibling) == (24, {"CPUMemory": 24})


def test_an_unfull_chunk_is_found_only_if_it_is_kept() -> None:
    kept, dropped = make_engine(), make_engine(save_unfull_chunk=False)
    tokens = list(range(24))

    assert (kept.store(tokens, range(6)), dropped.store(tokens, range(6))) == (24, 16)
    assert (kept.lookup(tokens)[0], dropped.lookup(tokens)[0]) == (24, 16)


def test_salts_never_share() -> None:
    engine = make_engine()
    tokens = list(range(32))
    engine.store(tokens, range(8), RequestIdentity(cache_salt="x"))

    assert engine.lookup(tokens, identity=RequestIdentity(cache_salt="y")) == (0, {})
    assert engine.lookup(tokens) == (0, {})
    assert engine.lookup(tokens, identity=RequestIdentity(cache_salt="x"))[0] == 32


def test_a_flipped_bit_is_a_miss_and_the_next_store_mends_it() -> None:
    """HT-13: never served; DELETE is emitted; the chunk can be stored again."""
    engine = make_engine()
    tokens = list(range(48))
    engine.store(tokens, range(12))
    engine.take_events()
    chain = engine.manager.database.chain()
    chain.extend(tokens)
    memory = engine.memory_obj(chain.hashes[7])
    assert memory is not None
    assert memory.location_tier == "CPUMemory"
    row = engine.manager.storage.tiers[0].get(chain.hashes[7] + b"\0\0").rows[2]
    engine._tiers[0].rows[row, 100] ^= 1

    mask, tier_tokens = engine.retrieve(tokens, range(40, 52))

    assert mask.sum() == 16
    assert tier_tokens == {"CPUMemory": 16}
    assert [type(event) for event in engine.take_events()] == [Delete]
    assert engine.lookup(tokens)[0] == 16
    engine.store(tokens, range(12))
    assert engine.lookup(tokens)[0] == 48
    engine.manager.check()


def test_a_full_tier_evicts_and_keeps_the_newest() -> None:
    engine = make_engine(rows=16)
    for number in range(8):
        engine.store([number * 1000 + token for token in range(32)], range(8))

    assert engine.lookup([7000 + token for token in range(32)])[0] == 32
    assert engine.lookup(list(range(32)))[0] == 0
    engine.manager.check()


def test_clear_empties_and_events_replay_to_nothing() -> None:
    engine = make_engine()
    engine.store(list(range(40)), range(10))
    engine.clear()

    assert engine.lookup(list(range(40))) == (0, {})
    inserted = deleted = 0
    for event in engine.take_events():
        inserted += isinstance(event, Insert)
        deleted += isinstance(event, Delete)
    assert inserted == deleted == 3


def test_threads_share_one_engine() -> None:
    """Concurrent stores and loads of the same prefixes give right bytes and clean books."""
    engine = make_engine(rows=48)
    prompts = [[seed, *range(31)] for seed in range(6)]
    for number, prompt in enumerate(prompts):
        blocks_of(engine)[number * 8 : number * 8 + 8] = number
        engine.store(prompt, range(number * 8, number * 8 + 8))
    wrong: list[int] = []

    def work(index: int) -> None:
        target = list(range(64 + index * 8, 72 + index * 8))
        for turn in range(50):
            number = (turn + index) % 6
            mask, _ = engine.retrieve(prompts[number], target)
            loaded = int(mask.sum()) // BLOCK_TOKENS
            if not (blocks_of(engine)[target[:loaded]] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not wrong
    assert engine.manager.lease_count == engine.manager.open_job_count == 0
    engine.manager.check()


def test_keys_name_objects_and_read_back() -> None:
    engine = make_engine()
    key = engine.key(b"\x07" * 32)

    assert OpalCacheEngineKey.from_string(key.to_string()) == key


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "engine.py"))

    assert "same bytes: True" in capsys.readouterr().out
