"""What vLLM's kv groups hold on the device, as the attention groups that they are cached as."""

from collections.abc import Callable, Iterable

import msgspec

from opal_connector.cluster.channel_facts import Block, facts_of_blocks
from opal_connector.events import DEVICE_TIER, Delete, Insert, KVCEvent, ObjectFact
from opal_connector.keys import HASH_BYTES
from opal_connector.keys.attention import AttentionLayout


class _Members:
    """A group of several kv groups: how many of them have which block, and its parent."""

    __slots__ = ("_counts", "_parents", "_position", "_whole")

    def __init__(self, position: int, members: int) -> None:
        self._position = position
        self._whole = members
        self._counts: dict[bytes, int] = {}
        self._parents: dict[bytes, bytes] = {}

    def insert(self, fact: ObjectFact) -> Iterable[KVCEvent]:
        """One member has these blocks; what all have now."""
        complete: list[Block] = []
        parent = fact.parent_hash
        for digest in _hashes(fact):
            count = self._counts[digest] = self._counts.get(digest, 0) + 1
            self._parents.setdefault(digest, parent)
            if count == self._whole:
                complete.append((self._parents[digest], digest))
            parent = digest
        for found in facts_of_blocks(self._position, complete):
            yield Insert(found, DEVICE_TIER)

    def delete(self, fact: ObjectFact) -> Iterable[KVCEvent]:
        """One member has lost these blocks; what all had before."""
        gone: list[bytes] = []
        for digest in _hashes(fact):
            count = self._counts[digest]
            if count == self._whole:
                gone.append(digest)
            if count > 1:
                self._counts[digest] = count - 1
            else:
                del self._counts[digest], self._parents[digest]
        if gone:
            yield Delete(ObjectFact(self._position, b"", b"".join(gone)), DEVICE_TIER)

    def held(self) -> list[Block]:
        """The blocks that all members have."""
        whole, parents = self._whole, self._parents
        return [
            (parents[digest], digest) for digest, count in self._counts.items() if count == whole
        ]


class DeviceGroups:
    """Folds facts about kv groups into facts about attention groups.

    A block of a group is on the device while all its kv groups have it. kv groups in no attention
    group are nobody's cache, and left out. Mutable state: the members of groups that have several;
    used by one thread.
    """

    def __init__(self, layout: AttentionLayout) -> None:
        self._position_of = {
            kv_group: position
            for position, group in enumerate(layout.groups)
            for kv_group in group.kv_groups
        }
        self._layout = layout
        self.block_tokens = {
            kv_group: group.block_tokens for group in layout.groups for kv_group in group.kv_groups
        }
        self._members = self._no_members()

    def forget(self) -> None:
        """Nothing is known any more."""
        self._members = self._no_members()

    def _no_members(self) -> dict[int, _Members]:
        return {
            position: _Members(position, len(group.kv_groups))
            for position, group in enumerate(self._layout.groups)
            if len(group.kv_groups) > 1
        }

    def fold(self, events: Iterable[Insert | Delete]) -> list[KVCEvent]:
        """Facts about attention groups that follow from facts about kv groups."""
        folded: list[KVCEvent] = []
        for event in events:
            fact = event.fact
            position = self._position_of[fact.group]
            members = self._members.get(position)
            if members is not None:
                is_insert = isinstance(event, Insert)
                folded += members.insert(fact) if is_insert else members.delete(fact)
            elif position == fact.group:
                folded.append(event)
            else:
                moved = msgspec.structs.replace(fact, group=position)
                folded.append(msgspec.structs.replace(event, fact=moved))
        return folded

    def held(self, position: int, of_kv_group: Callable[[int], list[Block]]) -> list[Block]:
        """The blocks of a group, where `of_kv_group` lists those of a kv group."""
        if not 0 <= position < len(self._layout.groups):
            return []
        members = self._members.get(position)
        if members is not None:
            return members.held()
        return of_kv_group(self._layout.groups[position].kv_groups[0])


def _hashes(fact: ObjectFact) -> Iterable[bytes]:
    run = fact.block_hashes
    return (run[start : start + HASH_BYTES] for start in range(0, len(run), HASH_BYTES))
