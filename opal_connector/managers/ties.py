"""What an object of one attention group is worth when another group's has left.

A hit needs all groups. An object serves lengths from a shortest one on, and for each of them full
attention needs all before it: where a block before the shortest has left every tier, no length
needs the object, whatever else is there. A state serves one length, which takes the end of every
window too. Such objects are given up: they leave before all others. They are not deleted, because
the missing block can come again, and then they are wanted again.

Not the other way round: a chain without the windows at its end serves those who go on elsewhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

from opal_connector.keys import HASH_BYTES, AttentionGroup, AttentionLayout
from opal_connector.managers.departures import Departures
from opal_connector.managers.object_index import ObjectIndex
from opal_connector.managers.records import ObjectKey, ObjectRecord, object_key


class _Tied(NamedTuple):
    """A group whose objects may be worth nothing without those of another."""

    suffix: bytes  # of the keys of its objects
    attention: AttentionGroup


class Ties:
    """Follows what comes to and leaves the tiers' indexes, and gives up what is worth nothing.

    Costs a look per block of what leaves. What is missing is known by the hash of a block: it is
    the same in all groups, and implies what comes before.

    Mutable state: `_missing` (of every object given up, the block without which it is worth
    nothing) and `_given_up` (the same, by that block); guarded by the owner of the books.
    """

    def __init__(
        self, layout: AttentionLayout, tiers: Sequence[tuple[ObjectIndex, Departures]]
    ) -> None:
        self._tiers = tuple(tiers)
        self._records = [index.records for index, _ in tiers]
        self._unit = layout.alignment_tokens
        self._block_tokens = [attention.block_tokens for attention in layout.groups]
        self._tied = [_tied_to(layout, group) for group in range(len(layout.groups))]
        self._missing: dict[ObjectKey, ObjectKey] = {}
        self._given_up: dict[ObjectKey, set[ObjectKey]] = {}

    def __len__(self) -> int:
        return len(self._missing)

    def __contains__(self, key: ObjectKey) -> bool:
        """Whether no length needs an object."""
        return key in self._missing

    def came(self, record: ObjectRecord) -> None:
        """An object is there or coming: what was missed of it is missed no more."""
        if not self._given_up or not self._tied[record.group]:
            return
        run = record.run
        for start in range(0, len(run), HASH_BYTES):
            block = object_key(run[start : start + HASH_BYTES], record.group)
            for key in self._given_up.pop(block, ()):
                del self._missing[key]
                for index, order in self._tiers:
                    found = index.records.get(key)
                    if found is not None:
                        order.want_again(found)

    def left(self, record: ObjectRecord) -> None:
        """An object has left a tier: what nobody can use now is given up."""
        if self._missing and record.key in self._missing and not self._is_known(record.key):
            self._forget(record.key)
        tied = self._tied[record.group]
        if not tied or self._is_known(record.key):
            return
        kept_blocks, run = self._kept_blocks(record), record.run
        for start in range(kept_blocks * HASH_BYTES, len(run), HASH_BYTES):
            block_hash = run[start : start + HASH_BYTES]
            for suffix, attention in tied:
                key = ObjectKey(block_hash + suffix)
                for records in self._records:
                    if key in records:
                        end_blocks = start // HASH_BYTES + 1
                        self._follow(records[key], attention, record, kept_blocks, end_blocks)
                        break

    def clear(self) -> None:
        """Forget what was given up: it has left."""
        self._missing.clear()
        self._given_up.clear()

    def check(self) -> None:
        """Raise AssertionError if something given up has left, or what it lacks is there."""
        pairs = {(key, block) for block, keys in self._given_up.items() for key in keys}
        assert pairs == set(self._missing.items()), "given up, and lacking something else"
        held: set[ObjectKey] = set()
        for index, _ in self._tiers:
            for record in index.records.values():
                run = record.run
                held.update(
                    object_key(run[start : start + HASH_BYTES], record.group)
                    for start in range(0, len(run), HASH_BYTES)
                )
        assert all(map(self._is_known, self._missing)), "what was given up has left"
        assert not held & self._given_up.keys(), "given up, and nothing is missing"

    # ---- inside ----

    def _follow(
        self,
        found: ObjectRecord,
        attention: AttentionGroup,
        record: ObjectRecord,
        kept_blocks: int,
        end_blocks: int,
    ) -> None:
        """Give up what ends `end_blocks` behind the start of what has left, if no length needs it.

        Both lie in one chunk, from whose start tokens are counted here. Where an object ends
        before the shortest length that needs it, there are several ways to go on from it: what
        is missing of one of them says nothing of the others.
        """
        block_tokens = self._block_tokens[record.group]
        least_tokens = self._least_tokens(attention, found, end_blocks * block_tokens)
        place = min(-(-least_tokens // block_tokens), end_blocks)
        if place > kept_blocks:
            missing = record.run[(place - 1) * HASH_BYTES : place * HASH_BYTES]
            self._give_up(found.key, object_key(missing, record.group))

    def _is_known(self, key: ObjectKey) -> bool:
        return any(key in records for records in self._records)

    def _kept_blocks(self, record: ObjectRecord) -> int:
        """Blocks at its start that other objects hold or will hold, in any tier."""
        run, group = record.run, record.group
        return max(
            max(index.shared_blocks(run, group), index.longest_write(run, group))
            for index, _ in self._tiers
        )

    def _least_tokens(
        self, attention: AttentionGroup, record: ObjectRecord, end_tokens: int
    ) -> int:
        """The shortest length that an object is of use for."""
        if attention.retention == "last":
            return end_tokens
        start_tokens = end_tokens - record.block_count * attention.block_tokens
        if attention.is_draft:  # of which the block behind the end must be there
            return -(-start_tokens // self._unit) * self._unit
        return (start_tokens // self._unit + 1) * self._unit

    def _give_up(self, key: ObjectKey, missing: ObjectKey) -> None:
        if key in self._missing:
            return
        self._missing[key] = missing
        self._given_up.setdefault(missing, set()).add(key)
        for index, order in self._tiers:
            found = index.records.get(key)
            if found is not None:
                order.give_up(found)

    def _forget(self, key: ObjectKey) -> None:
        missing = self._missing.pop(key)
        keys = self._given_up[missing]
        keys.discard(key)
        if not keys:
            del self._given_up[missing]


def _tied_to(layout: AttentionLayout, group: int) -> tuple[_Tied, ...]:
    """The groups whose objects may be worth nothing without those of `group`."""
    retention = layout.groups[group].retention
    others = [
        _Tied(object_key(b"", other), attention)
        for other, attention in enumerate(layout.groups)
        if other != group and attention.retention != "input"
    ]
    match retention:
        case "all":
            return tuple(others)
        case "window" | "last":
            return tuple(other for other in others if other.attention.retention == "last")
        case "chunk" | "input":  # a chunk that ends needs nothing of what is before
            return ()
