"""From specs to the objects of a store. Called by the manager, under its lock."""

import sys
from collections.abc import Mapping, Sequence

import msgspec

from opal_connector.keys import AttentionGroup, RequestIdentity, engine_extra_keys
from opal_connector.managers.block_tables import NO_BLOCK, BlockTables, StateBlock
from opal_connector.managers.coordinator import OpalKVCacheCoordinator
from opal_connector.managers.drafts import JobDraft
from opal_connector.managers.jobs import PlannedObject
from opal_connector.managers.records import ObjectRecord, ObjectSpec
from opal_connector.managers.refusals import Refusal
from opal_connector.managers.request import OpalRequest
from opal_connector.managers.storage_manager import OpalStorageManager
from opal_connector.managers.windowed import MambaManager
from opal_connector.transfers import ObjectTransfer, row_stamps

IN_FLIGHT = "in_flight"  # so many blocks are being stored that the rest has to wait


class StoreDraft(JobDraft):
    """A store being planned.

    Attributes:
        drop_reason: Why something was not planned, None if everything was.
        next_chunks: Per group the first whole chunk that is neither stored nor being stored.
        stored_tokens: Where the stored beginning of the sequence ends.
    """

    __slots__ = ("drop_reason", "next_chunks", "stored_tokens")

    def __init__(self, next_chunks: Sequence[int]) -> None:
        super().__init__()
        self.drop_reason: str | None = None
        self.next_chunks = list(next_chunks)
        self.stored_tokens = 0


class StorePlan:
    """Reserves room for the objects of one request, until one is refused.

    What follows a refused chunk of a chain is not stored either: nothing could reach it. Of a group
    that is no chain only the refused object is left out, and tried again while its blocks are
    there.

    Mutable state: the draft, the blocks that may still be planned, and the groups `_stopped` of
    which something was refused, to be tried again from there on; used under the lock of the books.
    """

    def __init__(
        self,
        request: OpalRequest,
        storage: OpalStorageManager,
        coordinator: OpalKVCacheCoordinator,
        tables: BlockTables,
        *,
        max_blocks: int | None = None,
    ) -> None:
        self.draft = StoreDraft(request.next_chunks)
        self._request = request
        self._storage = storage
        self._coordinator = coordinator
        self._tables = tables
        self._blocks_left = sys.maxsize if max_blocks is None else max_blocks
        self._stopped: set[int] = set()

    def add_chunks(self, full_blocks: int, *, include_tail: bool) -> None:
        """Plan what is computed of every group and not stored."""
        full_blocks = min(full_blocks, self._tabled_blocks(), len(self._request.chain.hashes))
        self._add(self._specs(full_blocks, include_tail=include_tail))
        if self.draft.drop_reason == Refusal.NO_PARENT and any(self._request.next_chunks):
            # What was stored of the head has left since: begin there again.
            self.draft.next_chunks = [0] * len(self.draft.next_chunks)
            self.draft.drop_reason = None
            self._stopped.clear()
            self._add(self._specs(full_blocks, include_tail=include_tail))

    def _specs(self, full_blocks: int, *, include_tail: bool) -> list[ObjectSpec]:
        request = self._request
        specs = self._coordinator.storable(
            request.chain,
            next_chunks=self.draft.next_chunks,
            full_blocks=full_blocks,
            include_tail=include_tail,
            junction_blocks=request.junction_blocks,
        )
        if request.owner:
            specs = [msgspec.structs.replace(spec, owner=request.owner) for spec in specs]
        return specs

    def _tabled_blocks(self) -> int:
        """Hash blocks that the host's tables reach to."""
        layout = self._coordinator.layout
        return (
            min(
                (
                    len(self._tables.tables[kv_group]) * attention.block_tokens
                    for attention in layout.groups
                    if attention.retention != "input"
                    for kv_group in attention.kv_groups
                ),
                default=0,
            )
            // layout.hash_block_tokens
        )

    def _add(self, specs: Sequence[ObjectSpec]) -> None:
        """Plan these, in their order, as far as they go."""
        for spec in specs:
            manager = self._coordinator.managers[spec.group]
            stop = spec.first_block + spec.block_count
            addresses = [
                address
                for kv_group in manager.attention.kv_groups
                for address in self._tables.addresses(kv_group, spec.first_block, stop)
            ]
            reason = None
            if NO_BLOCK not in addresses:
                reason = self._plan(spec, addresses)
            elif manager.is_chain:
                reason = Refusal.NO_PARENT.value
            if spec.is_passing and reason == Refusal.FULL:
                reason = None  # as it should be: it is worth nobody's room
            if reason is not None:
                self.draft.drop_reason = reason
                self._stopped.add(spec.group)
                if manager.is_chain:
                    return
            elif spec.group not in self._stopped:
                self._advance(spec, manager.chunk_blocks)

    def add_states(self, states: Sequence[StateBlock]) -> None:
        """Plan states that the host has handed over, where all members of a group are there."""
        handed = {(state.kv_group, state.boundary_tokens): state.block_id for state in states}
        boundaries = sorted({boundary for _, boundary in handed})
        for group, manager in enumerate(self._coordinator.managers):
            if not isinstance(manager, MambaManager):
                continue
            hashes = self._coordinator.group_hashes(self._request.chain, group)
            for boundary in boundaries:
                spec = manager.state_spec(hashes, boundary)
                addresses = self._state_addresses(handed, manager.attention, boundary)
                if spec is None or not addresses:
                    continue
                reason = self._plan(spec, addresses, is_limited=False)
                self.draft.drop_reason = reason or self.draft.drop_reason

    def _state_addresses(
        self, handed: Mapping[tuple[int, int], int], attention: AttentionGroup, boundary: int
    ) -> list[int]:
        found = [handed.get((kv_group, boundary)) for kv_group in attention.kv_groups]
        if any(block_id is None or block_id == self._tables.null_block for block_id in found):
            return []
        stride = self._tables.group_stride
        return [
            kv_group * stride + block_id
            for kv_group, block_id in zip(attention.kv_groups, found, strict=True)
            if block_id is not None
        ]

    def _plan(
        self, spec: ObjectSpec, addresses: Sequence[int], *, is_limited: bool = True
    ) -> str | None:
        """Why an object is not planned; None if it is, or is there already."""
        if is_limited and len(addresses) > self._blocks_left:
            return IN_FLIGHT
        outcome = self._storage.reserve(spec)
        if isinstance(outcome, Refusal):
            return None if outcome is Refusal.PRESENT else outcome.value
        place, record = outcome
        self._blocks_left -= len(addresses)
        self.draft.transfers.append(self._transfer(spec, place, record, addresses))
        self.draft.planned.append(
            PlannedObject(tier=place, record=record, first_block=spec.first_block)
        )
        return None

    def _transfer(
        self, spec: ObjectSpec, place: int, record: ObjectRecord, addresses: Sequence[int]
    ) -> ObjectTransfer:
        return ObjectTransfer(
            tier=place,
            group=spec.group,
            tier_rows=record.rows,
            block_ids=tuple(addresses),
            stamps=row_stamps(spec.run, self._storage.members(spec.group), spec.group),
            name=self._storage.file_name(record, place),
        )

    def _advance(self, spec: ObjectSpec, chunk_blocks: int) -> None:
        stop = spec.first_block + spec.block_count
        if spec.block_count == chunk_blocks:
            self.draft.next_chunks[spec.group] = stop // chunk_blocks
        if spec.group == 0:
            attention = self._coordinator.managers[0].attention
            self.draft.stored_tokens = stop * attention.block_tokens


def describe_stores(
    planned: Sequence[PlannedObject],
    identity: RequestIdentity,
    tokens: Sequence[int],
    groups: Sequence[AttentionGroup],
) -> None:
    """Note what events will say of stored objects, where somebody hashes them himself."""
    for item in planned:
        attention = groups[item.record.group]
        if attention.retention == "input":
            continue  # these are no tokens of the sequence
        blocks, block_tokens = item.record.block_count, attention.block_tokens
        start = item.first_block * block_tokens
        item.token_ids = tuple(tokens[start : start + blocks * block_tokens])
        item.extra_keys = engine_extra_keys(
            identity, first_block=item.first_block, block_count=blocks, block_tokens=block_tokens
        )
