"""Where blocks can be: the tiers of the workers that serve one model, as columns and bits."""

from collections.abc import Iterable, Mapping

import msgspec

from opal_connector.cluster.group_layout import ScoredGroups, scored_groups
from opal_connector.cluster.index import DEVICE_COLUMN, PrefixIndex
from opal_connector.cluster.worker_names import WorkerNames
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import InstanceDescription, TierDescription
from opal_connector.keys import LoraIdentity

TierColumn = tuple[str, int, bool]  # its name, its column, whether it is shared


class ModelPlaces:
    """The workers of one model and block size: their bits, the columns of their tiers, the indexes.

    A tier of the workers' own has one column for all who have one of that name, a shared one has a
    column per medium. An index is of the groups of one number and block size: along a sequence the
    blocks of two sizes are not each other's parents. Mutable state: all of that, and which workers
    are live; used by one thread.
    """

    def __init__(self, model: str, block_tokens: int) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.indexes: dict[tuple[int, int], PrefixIndex] = {}
        self.live_mask = 0
        self._descriptions: dict[str, InstanceDescription] = {}
        self.names = WorkerNames()
        self._columns: dict[tuple[str, str], int] = {(DEVICE_TIER, ""): DEVICE_COLUMN}
        self._undescribed: dict[str, dict[str, TierDescription]] = {}
        self._orders: list[tuple[tuple[TierColumn, ...], int]] | None = None
        self._scored: list[tuple[ScoredGroups, int]] | None = None

    # ---- workers ----

    def enter(self, description: InstanceDescription) -> None:
        """A worker is here, or is described anew. What it holds is not touched."""
        worker_id = description.instance_id
        self.names.add(worker_id)
        self._descriptions[worker_id] = description
        self._mount()

    def leave(self, worker_id: str) -> None:
        """A worker that holds nothing any more is gone."""
        self.set_live(worker_id, is_live=False)
        del self._descriptions[worker_id]
        self._undescribed.pop(worker_id, None)
        self.names.discard(worker_id)
        self._mount()

    def set_live(self, worker_id: str, *, is_live: bool) -> None:
        """Whether a worker is to be scored."""
        bit = self.names.bits[worker_id]
        self.live_mask = self.live_mask | bit if is_live else self.live_mask & ~bit

    def bit(self, worker_id: str) -> int:
        """The worker's bit in every mask."""
        return self.names.bits[worker_id]

    @property
    def is_empty(self) -> bool:
        """Whether nobody is left."""
        return not self.names.bits

    # ---- tiers ----

    def note_tier(self, worker_id: str, tier: TierDescription) -> None:
        """A worker holds something in a tier; one that it has not described comes behind those."""
        seen = self._undescribed.setdefault(worker_id, {})
        described = {known.name for known in self._descriptions[worker_id].tiers}
        if tier.name not in described and tier.name not in seen:
            seen[tier.name] = tier
            self._orders = None

    def column(self, tier: TierDescription) -> int:
        """The column of a tier."""
        return self._columns.setdefault((tier.name, tier.shared_id), len(self._columns))

    def tier_orders(self) -> list[tuple[tuple[TierColumn, ...], int]]:
        """The tiers besides the device, the fastest first, and the workers that have them so."""
        if self._orders is None:
            orders: dict[tuple[TierColumn, ...], int] = {}
            for worker_id, description in self._descriptions.items():
                order = tuple(
                    (tier.name, self.column(tier), bool(tier.shared_id))
                    for tier in self._ordered_tiers(worker_id, description)
                    if tier.name != DEVICE_TIER
                )
                orders[order] = orders.get(order, 0) | self.names.bits[worker_id]
            self._orders = list(orders.items())
        return self._orders

    def _ordered_tiers(
        self, worker_id: str, description: InstanceDescription
    ) -> list[TierDescription]:
        """The fastest first: as described, then what was only heard of, host memory first."""
        described = {tier.name for tier in description.tiers}
        heard = [
            tier
            for tier in self._undescribed.get(worker_id, {}).values()
            if tier.name not in described
        ]
        return [
            *description.tiers,
            *sorted(heard, key=lambda tier: not tier.name.startswith("CPU")),
        ]

    def index(self, group: int, block_tokens: int | None = None) -> PrefixIndex:
        """The index of a group; without a size, of one whose blocks are those that are hashed."""
        key = (group, block_tokens or self.block_tokens)
        index = self.indexes.get(key)
        if index is None:
            index = self.indexes[key] = PrefixIndex()
            self._mount()
        return index

    def scored(self) -> list[tuple[ScoredGroups, int]]:
        """By which groups workers are scored, and the workers of which that is true.

        A worker answers for the groups that it describes, and not for those of others.
        """
        if self._scored is None:
            scored: dict[ScoredGroups, int] = {}
            for worker_id, description in self._descriptions.items():
                groups = scored_groups(description)
                if groups.groups:
                    scored[groups] = scored.get(groups, 0) | self.names.bits[worker_id]
            self._scored = list(scored.items())
        return self._scored

    def scored_by(self, worker_id: str) -> ScoredGroups | None:
        """By which groups a worker is scored; None where it is not."""
        bit = self.names.bits.get(worker_id, 0)
        return next((groups for groups, having in self.scored() if having & bit), None)

    def alignment_tokens(self, worker_id: str) -> int:
        """Tokens at whose multiples what the worker serves ends."""
        scored = self.scored_by(worker_id)
        return self.block_tokens if scored is None else scored.alignment_tokens

    def adapters(self, lora_name: str | None) -> Mapping[LoraIdentity | None, int]:
        """Which weights an adapter's name means, and at which workers.

        A worker that has not said so is one that knows adapters by their names alone.
        """
        if lora_name is None:
            return {None: -1}
        meant: dict[LoraIdentity | None, int] = {}
        for worker_id, description in self._descriptions.items():
            named = [lora for lora in description.adapters if lora.name == lora_name]
            lora = named[-1] if named else LoraIdentity(lora_name, "", "")
            meant[lora] = meant.get(lora, 0) | self.names.bits[worker_id]
        return meant

    def _mount(self) -> None:
        self._orders = self._scored = None
        mounts: dict[int, int] = {}
        for worker_id, description in self._descriptions.items():
            for tier in _shared(description.tiers):
                column = self.column(tier)
                mounts[column] = mounts.get(column, 0) | self.names.bits[worker_id]
        for (_, shared_id), column in self._columns.items():
            if shared_id:
                for index in self.indexes.values():
                    index.set_mounts(column, mounts.get(column, 0))


class HashedPrefix(msgspec.Struct, frozen=True):
    """A prompt's chain of hashes for one model, and the workers (a mask) that it is meant for."""

    places: ModelPlaces
    hashes: list[bytes]
    workers: int


def _shared(tiers: Iterable[TierDescription]) -> list[TierDescription]:
    return [tier for tier in tiers if tier.shared_id]
