"""An engine's own stream that changes its shape or exceeds all bounds."""

from typing import Any

import msgspec

from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.cluster.ingest import VllmMachine
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest

pack = msgspec.msgpack.Encoder().encode


def stored(block_size: int, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": list(range(block_size)),
        "block_size": block_size,
        "medium": "GPU",
        **more,
    }


def test_an_engine_that_returns_with_another_block_size_is_known_again() -> None:
    """It was learned from the old process, and is no fact about the new one."""
    kvbm = KVBM()
    machine = VllmMachine(kvbm, "engine", has_replay=False)
    machine.on_connected(0.0)
    machine.on_message(0, pack([0.0, [stored(4)], None]), 1.0)
    assert kvbm.scorer(PrefixRequest(token_ids=list(range(8)))) == {"engine": 0.5}
    machine.on_disconnected(2.0)
    machine.on_connected(3.0)
    machine.on_message(0, pack([0.0, [stored(8)], None]), 4.0)

    assert kvbm.scorer(PrefixRequest(token_ids=list(range(8)))) == {"engine": 1.0}
    kvbm.check()


def test_what_waits_for_an_ancestor_is_bounded_by_all_that_it_holds() -> None:
    """Extra keys and tokens that are none can be longer than the tokens of any block."""
    chain = EngineChain(max_parked_bytes=100_000)
    for number in range(50):
        chain.stored(StoredBlocks(0, "Device", [number], 1_000, [1], 1, [[["x" * 10_000, 0]]]))
        chain.stored(StoredBlocks(0, "Device", [100 + number], 1_000, ["y" * 10_000], 1))  # type: ignore[list-item]

    assert chain.parked_count <= 10
    assert chain.dropped_events >= 40


def test_names_of_tiers_are_bounded() -> None:
    """Every event walks over those that were ever heard of."""
    chain = EngineChain()
    for number in range(1_000):
        chain.stored(StoredBlocks(0, f"tier {number}", [number], None, [1], 1))
        chain.removed(0, f"tier {number}", [number])

    assert len(chain.tiers()) <= 256
    assert chain.counters.untranslatable >= 700
