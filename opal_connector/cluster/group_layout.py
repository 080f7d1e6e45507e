"""What of a worker's groups must be there, read off its description."""

from functools import cached_property
from math import lcm

import msgspec

from opal_connector.events.channel import InstanceDescription
from opal_connector.keys.attention import AttentionGroup


class ScoredGroups(msgspec.Struct, frozen=True, dict=True):
    """The groups by which a worker is scored, each with its number, the whole-prefix ones first.

    Groups of which it is not known what they look back on are followed, and not scored. Prompts are
    hashed by `hash_block_tokens`.
    """

    groups: tuple[tuple[int, AttentionGroup], ...]
    hash_block_tokens: int

    @cached_property
    def alignment_tokens(self) -> int:
        """Tokens at whose multiples a block of every group ends."""
        return lcm(*(group.block_tokens for _, group in self.groups))

    @cached_property
    def whole(self) -> tuple[tuple[int, AttentionGroup], ...]:
        """Those that look back on everything."""
        return tuple(one for one in self.groups if one[1].retention == "all")

    @cached_property
    def partial(self) -> tuple[tuple[int, AttentionGroup], ...]:
        """Those that look back on a part."""
        return tuple(one for one in self.groups if one[1].retention != "all")

    @cached_property
    def only_chain(self) -> int | None:
        """The number of the only group, if it needs everything and its blocks are those hashed."""
        (number, group), *others = self.groups
        is_chain = group.retention == "all" and group.block_tokens == self.hash_block_tokens
        return number if is_chain and not others else None


def scored_groups(description: InstanceDescription) -> ScoredGroups:
    """The groups to score a worker by; none where nothing could be said of it.

    Where a group is of an unknown kind, what is known of those that need everything still counts;
    without such a group there is no chain that could tell how far a match goes.
    """
    known: list[tuple[int, AttentionGroup]] = []
    is_all_known = True
    for described in description.groups:
        group = described.attention(description.block_tokens)
        if group is None:
            is_all_known = False
        elif group.retention != "input":  # it is not found by the prompt's tokens
            known.append((described.group, group))
    known.sort(key=lambda one: (one[1].retention != "all", one[0]))
    if not is_all_known and not any(group.retention == "all" for _, group in known):
        known = []
    return ScoredGroups(tuple(known), description.block_tokens)


def block_tokens_of(description: InstanceDescription, group: int) -> int:
    """Tokens of a block of a group; one that is not described has the description's."""
    for described in description.groups:
        if described.group == group:
            return described.block_tokens or description.block_tokens
    return description.block_tokens
