"""What an engine's own stream tells of its kv groups, event by event."""

from enum import Enum, auto
from math import gcd
from typing import Final

import msgspec

from opal_connector.cluster.ingest.vllm_wire import EngineStored
from opal_connector.events.channel import GroupDescription
from opal_connector.keys.attention import AttentionKind

_MAX_GROUPS: Final = 64
_UNKNOWN_KIND: Final = "unknown"


class GroupNews(Enum):
    """What an event says of its group that was not known before."""

    NOTHING = auto()
    DESCRIBED = auto()  # a new group, or more of a known one
    LARGER = auto()  # what was seen of it before were parts of blocks
    NO_SIZE = auto()
    OTHER_SIZE = auto()  # not to be read: a part of a block, or of no size that could be
    TOO_MANY = auto()


class _Group(msgspec.Struct):
    block_tokens: int
    kind: str | None = None
    window_tokens: int = 0
    leaves_out: bool = False  # it has named fewer blocks than it had tokens for


class EngineGroups:
    """The kv groups of one rank.

    An engine may announce a part of a block as one of a smaller size: a group has the largest size
    that was seen, and prompts are hashed by what divides all of them. An engine that says no kinds
    and has one group has the kind that all had before there were others; of several groups without
    a kind, or of one that leaves blocks out, nothing can be said, and no chain is seen in them.
    Mutable state: the groups, and whether they are those of a process that may be no more.
    """

    def __init__(self, given_block_tokens: int | None) -> None:
        self._is_given = given_block_tokens is not None
        self._groups: dict[int, _Group] = {}
        self.unit_tokens = given_block_tokens
        self.are_old = False

    def see(self, event: EngineStored) -> GroupNews:
        """Learn from a report of stored blocks."""
        size = event.block_size if event.token_ids else self._size_of(event.group)
        if size <= 0:
            return GroupNews.NO_SIZE
        if self.are_old and event.token_ids:
            self._compare(event.group, size)
        group = self._groups.get(event.group)
        unit = self.unit_tokens
        if group is not None and (size < group.block_tokens or size % group.block_tokens):
            return GroupNews.OTHER_SIZE
        if self._is_given and unit is not None and size % unit:
            return GroupNews.OTHER_SIZE
        news = GroupNews.NOTHING
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                return GroupNews.TOO_MANY
            group = self._groups[event.group] = _Group(size)
            news = GroupNews.DESCRIBED
        elif size > group.block_tokens:
            group.block_tokens = size
            news = GroupNews.LARGER
        self.unit_tokens = size if unit is None else gcd(unit, size)
        is_characterised = self._characterise(group, event)
        return GroupNews.DESCRIBED if is_characterised and news is GroupNews.NOTHING else news

    @property
    def sizes(self) -> dict[int, int]:
        """Tokens of a block, by group."""
        return {number: group.block_tokens for number, group in self._groups.items()}

    def described(self) -> tuple[GroupDescription, ...]:
        """The groups as far as they are known."""
        return tuple(
            GroupDescription(
                number,
                self._kind_of(group),
                group.block_tokens,
                span_tokens=group.window_tokens,
            )
            for number, group in sorted(self._groups.items())
        )

    # ---- inside ----

    @staticmethod
    def _characterise(group: _Group, event: EngineStored) -> bool:
        before = (group.kind, group.window_tokens, group.leaves_out)
        group.kind = event.kind or group.kind
        group.window_tokens = event.window_tokens or group.window_tokens
        if group.kind is None and event.token_ids:
            named = len(event.block_hashes) * group.block_tokens
            group.leaves_out |= named < len(event.token_ids)
        return (group.kind, group.window_tokens, group.leaves_out) != before

    def _kind_of(self, group: _Group) -> str:
        if group.kind is not None:
            return group.kind
        is_alone = len(self._groups) == 1 and not group.leaves_out
        return AttentionKind.FULL.value if is_alone else _UNKNOWN_KIND

    def _size_of(self, group: int) -> int:
        known = self._groups.get(group)
        return known.block_tokens if known is not None else self.unit_tokens or 0

    def _compare(self, group: int, size: int) -> None:
        """Forget the groups of the process before if this one is seen to be another."""
        self.are_old = False
        known = self._groups.get(group)
        if known is None or known.block_tokens != size:
            self._groups.clear()
            if not self._is_given:
                self.unit_tokens = None
