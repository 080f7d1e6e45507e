"""What one policy hands to another that takes its place."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from opal_connector.eviction.base import EvictionPolicy, Key
from opal_connector.eviction.ghosts import Ghosts
from opal_connector.eviction.line import Line


@dataclass
class Handover:
    """An order in two lines that share their pins: what came once, and what is used often.

    `share` is the part of the capacity that the first line is meant to have.
    """

    once: Line
    often: Line
    pinned: set[Key]
    ghosts: Ghosts = field(default_factory=Ghosts)
    capacity: int = 0
    share: float = 0.0

    def by_age(self) -> Iterator[tuple[Key, bool]]:
        """All keys, and whether each is used often; the two lines as if they were equally old."""
        once, often = list(self.once), list(self.often)
        entries = [((place + 0.5) / len(once), key, False) for place, key in enumerate(once)]
        entries += [((place + 0.5) / len(often), key, True) for place, key in enumerate(often)]
        entries.sort(key=lambda entry: entry[0])
        return ((key, is_often) for _, key, is_often in entries)


class Candidate(EvictionPolicy):
    """A policy that can take the place of another and give its own up."""

    @abstractmethod
    def hand_over(self) -> Handover:
        """Give the order away; the policy is not used afterwards."""

    @abstractmethod
    def take_over(self, order: Handover) -> None:
        """Begin with the order of another policy, in place of an empty one."""
