"""Engines whose stream speaks of several kv groups, or of one that says little of itself."""

from typing import Any

import msgspec
import pytest

from opal_connector.cluster.ingest import VllmMachine
from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest, WorkerMatch
from opal_connector.events import DEVICE_TIER

pack = msgspec.msgpack.Encoder().encode
SIZE = 2
TOKENS = list(range(8))  # four blocks


class Stream:
    """One engine's stream, and what an index makes of it."""

    def __init__(self) -> None:
        self.kvbm = KVBM()
        self.machine = VllmMachine(self.kvbm, "engine", has_replay=False)
        self._sequence = -1

    def say(self, *events: dict[str, Any]) -> None:
        self._sequence += 1
        payload = pack([float(self._sequence), list(events), 0])
        self.machine.on_message(self._sequence, payload, 1.0)

    def stored(
        self,
        hashes: list[int],
        tokens: list[int] = TOKENS,
        *,
        parent: int | None = None,
        **fields: Any,
    ) -> None:
        self.say(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": SIZE,
                "medium": "GPU",
                **fields,
            }
        )

    @property
    def matched_tokens(self) -> int:
        matches = self.kvbm.match(PrefixRequest(token_ids=TOKENS))
        return matches.get("engine", WorkerMatch(0, 0)).total_tokens

    @property
    def kinds(self) -> dict[int, str]:
        groups = self.kvbm.workers["engine"].description.groups
        return {one.group: one.kind for one in groups}

    def blocks(self, group: int) -> int:
        return self.kvbm.workers["engine"].block_counts.get((group, DEVICE_TIER), 0)


def test_one_group_without_a_kind_is_a_dense_model_as_ever() -> None:
    """Older engines say no kinds, and their blocks are the prefix."""
    stream = Stream()
    stream.stored([1, 2, 3, 4])

    assert stream.matched_tokens == 8


def test_a_sparse_group_without_a_kind_is_never_taken_for_the_chain() -> None:
    """The few blocks that it keeps, and the rest that it lacks, say nothing of the prefix."""
    stream = Stream()
    stream.stored([4])

    assert stream.kinds == {0: "unknown"}
    assert stream.matched_tokens == 0


def test_several_groups_without_kinds_are_followed_and_not_scored() -> None:
    """Which of them is the chain cannot be told; one that drops its blocks would hide all hits."""
    stream = Stream()
    stream.stored([1, 2, 3, 4], group_idx=0)
    stream.stored([1, 2, 3, 4], group_idx=1)

    assert stream.matched_tokens == 0
    assert (stream.blocks(0), stream.blocks(1)) == (4, 4)


@pytest.mark.parametrize(
    "other", [{"kv_cache_spec_kind": "brand_new"}, {}, {"kv_cache_spec_kind": "sliding_window"}]
)
def test_what_is_not_known_of_another_group_hides_no_hit_of_the_chain(
    other: dict[str, str],
) -> None:
    """A kind of the future, none, or a window that nobody says the length of."""
    stream = Stream()
    stream.stored([1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="full_attention")
    stream.stored([4], group_idx=0, **other)

    assert stream.matched_tokens == 8


def test_a_window_of_a_known_length_must_be_there() -> None:
    """Of the chain alone more would be promised than the engine can serve."""
    stream = Stream()
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    stream.stored([1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="full_attention")
    stream.stored([], group_idx=0, **window)
    assert stream.matched_tokens == 0
    stream.stored([3], group_idx=0, **window)
    assert stream.matched_tokens == 6, "the last two tokens of it"
    stream.stored([4], group_idx=0, **window)
    assert stream.matched_tokens == 8
    for block, left in ((4, 6), (3, 0)):
        removed = {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU"}
        stream.say(removed | {"group_idx": 0})
        assert stream.matched_tokens == left


def test_an_event_of_no_blocks_is_no_fault() -> None:
    """A sparse group announces spans of which it keeps nothing."""
    stream = Stream()
    stream.stored([], kv_cache_spec_kind="mamba")

    assert stream.machine.ranks.worker_ids() == ["engine"]
    assert stream.machine.metrics.untranslated == 0
    assert stream.machine.metrics.malformed == 0


def test_a_part_of_a_block_is_none_of_the_groups_blocks() -> None:
    """It is announced as a block of a smaller size, before the whole one or behind it."""
    stream = Stream()
    kind = {"kv_cache_spec_kind": "full_attention"}
    stream.stored([1], TOKENS[:2], **kind)
    assert stream.blocks(0) == 1
    stream.stored([2], TOKENS[:4], block_size=4, **kind)
    assert stream.blocks(0) == 1
    stream.stored([3], TOKENS[4:6], parent=2, **kind)

    assert stream.blocks(0) == 1
    assert stream.matched_tokens == 4
    assert stream.machine.metrics.other_block_sizes == 1


def test_a_group_of_smaller_blocks_that_turns_up_late_costs_nothing_that_was_known() -> None:
    """A system prompt is announced once; whoever forgot it would never find it again."""
    stream = Stream()
    kind = {"kv_cache_spec_kind": "full_attention"}
    stream.stored([2, 4], block_size=4, group_idx=0, **kind)
    stream.stored([1, 2, 3, 4], group_idx=1, **kind)

    assert stream.kvbm.workers["engine"].description.block_tokens == SIZE
    assert (stream.blocks(0), stream.blocks(1)) == (2, 4)
    assert stream.matched_tokens == 8
