"""What the publisher asks of whoever owns the facts. It asks from a thread of its own."""

from collections.abc import Iterator
from typing import Any, Protocol

from opal_connector.cluster.channel_facts import Block
from opal_connector.events import KVCEvent, ObjectFact
from opal_connector.events.channel import InstanceDescription, SystemEvent


class InstanceSource(Protocol):
    """An instance and the books of its tiers. Nothing here may make its engine wait."""

    @property
    def is_ready(self) -> bool:
        """Whether the description is final; until then the channel stays closed for a while."""

    @property
    def model(self) -> str:
        """The name that the model is served by."""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block."""

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """The (group, tier) pairs that have books, from the fastest tier to the slowest."""

    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        """The description as it is now."""

    def system(self) -> SystemEvent:
        """The load as it is now."""

    def is_complete(self, tier: str) -> bool:
        """Whether the books of a tier know already what it holds from before."""

    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        """What the books hold of a group in a tier, at the time of the call or later.

        No event that was handed over before the call is missing from it.
        """

    def pass_lock(self) -> None:
        """Return when all that the books have shown so far has been handed over as events."""


class DeviceSource(Protocol):
    """Translates what the engine says about its own blocks, and knows what it has there."""

    @property
    def is_complete(self) -> bool:
        """False once events were lost."""

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups that were heard of."""

    def translate(self, raw: Any) -> list[KVCEvent]:
        """Facts that follow from something that was handed over."""

    def held(self, group: int) -> list[Block]:
        """The blocks that are there, after what was translated."""

    def forget(self) -> None:
        """Events were lost: nothing is known any more."""
