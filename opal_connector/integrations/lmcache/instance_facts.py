"""An LMCache server as an instance of a cluster: who it is, how full it is, what it announces."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from typing_extensions import override

from opal_connector.cluster.publisher_sources import InstanceSource
from opal_connector.events import ObjectFact
from opal_connector.events.channel import (
    GroupDescription,
    InstanceDescription,
    SystemEvent,
    TierDescription,
    TierLoad,
)
from opal_connector.integrations.lmcache.bus_follower import BusFollower
from opal_connector.integrations.lmcache.placements import HOST_TIER, PlacementBooks
from opal_connector.integrations.lmcache.tier_follower import TierFollower
from opal_connector.keys.attention import AttentionKind

_FULL: Final = (GroupDescription(0, AttentionKind.FULL.value),)


class ServerFacts(InstanceSource):
    """What the publisher asks of an LMCache server.

    The tiers are volatile to others: what a tier held before a restart is announced again when its
    tokens are known again, and not before. Mutable state: the groups as they were last described,
    and the followers of tiers, which whoever owns them replaces as a whole.
    """

    def __init__(
        self, context: Any, placements: PlacementBooks, bus: BusFollower, served_name: str | None
    ) -> None:
        self._context = context
        self._placements = placements
        self._bus = bus
        self._served_name = served_name
        self._groups: tuple[GroupDescription, ...] = _FULL
        self.followers: tuple[TierFollower, ...] = ()

    @property
    @override
    def is_ready(self) -> bool:
        return self._placements.model is not None

    @property
    @override
    def model(self) -> str:
        return self._served_name or self._placements.model or ""

    @property
    @override
    def block_tokens(self) -> int:
        return int(self._context.chunk_size)

    @property
    @override
    def places(self) -> tuple[tuple[int, str], ...]:
        return self._placements.places

    @override
    def describe(self, instance_id: str, incarnation: int) -> InstanceDescription:
        """The server as it is now; groups are known once an engine has registered."""
        return InstanceDescription(
            instance_id=instance_id,
            incarnation=incarnation,
            model=self.model,
            block_tokens=self.block_tokens,
            tiers=tuple(TierDescription(tier) for tier in self._placements.tiers),
            groups=self._describe_groups(),
        )

    @override
    def system(self) -> SystemEvent:
        """How full the tiers are. Requests are the engines' own."""
        used_bytes, capacity_bytes = self._context.storage_manager.get_l1_usage()
        loads = [TierLoad(HOST_TIER, int(used_bytes), int(capacity_bytes))]
        for follower in self.followers:
            loads += follower.loads()
        sizes = self._bus.object_bytes.copy().values()
        return SystemEvent(
            chunk_bytes=sum(sizes) * self._bus.world_size, tiers=tuple(_added(loads))
        )

    @override
    def is_complete(self, tier: str) -> bool:
        return True

    @override
    def list_facts(self, group: int, tier: str) -> Iterator[ObjectFact]:
        return iter(self._placements.facts(group, tier))

    @override
    def pass_lock(self) -> None:
        with self._placements.lock:
            pass

    def _describe_groups(self) -> tuple[GroupDescription, ...]:
        model = self._placements.model
        try:
            windows = self._context.layout_desc_registry.find_attn_desc(
                model, self._bus.world_size
            ).num_chunks_in_sw
        except ValueError:  # no engine is registered now
            return self._groups
        if list(windows) != [-1]:
            self._groups = tuple(
                self._describe_group(group, window) for group, window in enumerate(windows)
            )
        return self._groups

    def _describe_group(self, group: int, window_chunks: int) -> GroupDescription:
        if window_chunks < 0:
            return GroupDescription(
                group, AttentionKind.FULL.value, self.block_tokens, kv_groups=(group,)
            )
        # The window that reaches back into so many chunks, and no further.
        return GroupDescription(
            group,
            AttentionKind.SLIDING_WINDOW.value,
            self.block_tokens,
            kv_groups=(group,),
            span_tokens=window_chunks * self.block_tokens + 1,
        )


def _added(loads: Iterable[TierLoad]) -> Iterator[TierLoad]:
    """One load for each tier, of all who have it."""
    used: dict[str, int] = {}
    capacity: dict[str, int] = {}
    for load in loads:
        used[load.tier] = used.get(load.tier, 0) + load.used_bytes
        capacity[load.tier] = capacity.get(load.tier, 0) + load.capacity_bytes
    return (TierLoad(tier, used[tier], capacity[tier]) for tier in used)
