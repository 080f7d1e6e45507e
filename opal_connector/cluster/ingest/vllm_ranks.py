"""What an engine's events mean for the index: one worker per rank, one chain per worker."""

from collections.abc import Callable
from typing import Final

import msgspec

from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.cluster.ingest.states import BlockIndex, SourceMetrics
from opal_connector.cluster.ingest.vllm_wire import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
)
from opal_connector.events.channel import GroupDescription, InstanceDescription
from opal_connector.events.facts import DEVICE_TIER, Delete, Insert

_MAX_RANKS: Final = 1_024
_MAX_GROUPS: Final = 64
_DEFAULT_KIND: Final = "full_attention"


def worker_id_of(name: str, rank: int) -> str:
    """How the KVBM calls a rank of an engine."""
    return f"{name}/dp{rank}" if rank else name


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's stream does not say itself.

    Without `block_tokens` the first block stored decides; `rank` is that of batches without one.
    """

    model: str = ""
    block_tokens: int | None = None
    rank: int = 0


class EngineRank:
    """One rank of one engine.

    Mutable state: its chain, and its description, None until its block size is known. Its source
    guards it.
    """

    def __init__(
        self,
        index: BlockIndex,
        worker_id: str,
        metrics: SourceMetrics,
        *,
        model: str,
        block_tokens: int | None,
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._model = model
        self._block_tokens = block_tokens
        self._is_size_old = False  # learned from a process that may be no more
        self._is_size_given = block_tokens is not None
        self._kinds: dict[int, str] = {}
        self._incarnation = 0
        self._is_live = True
        self._is_joined = False
        self.worker_id = worker_id
        self.chain = EngineChain()

    def apply(self, events: list[EngineEvent]) -> None:
        """Take events in order."""
        facts: list[Insert | Delete] = []
        for event in events:
            match event:
                case EngineStored():
                    if self._is_readable(event):
                        facts += self.chain.stored(
                            StoredBlocks(
                                event.group,
                                event.tier,
                                event.block_hashes,
                                event.parent,
                                event.token_ids,
                                event.block_size,
                                event.extra_keys,
                                event.lora_name,
                            )
                        )
                case EngineRemoved():
                    facts += self.chain.removed(event.group, event.tier, event.block_hashes)
                case EngineCleared():
                    facts += self.chain.cleared(DEVICE_TIER)
        if facts:
            self._index.process_kvc_events(self.worker_id, facts)

    def begin_anew(self) -> bool:
        """Forget all that it said; whether there was anything."""
        self.chain = EngineChain()
        self._incarnation += 1
        self._is_size_old = not self._is_size_given
        if not self._is_joined:
            return False
        had_any = any(digest.block_count for digest in self._index.digests(self.worker_id))
        self._join()
        return had_any

    def set_live(self, *, is_live: bool) -> None:
        """Whether what it has is to be used."""
        self._is_live = is_live
        if self._is_joined:
            self._index.set_live(self.worker_id, is_live=is_live)

    def leave(self) -> None:
        """It is gone, and all that it had."""
        if self._is_joined:
            self._index.remove_worker(self.worker_id)
            self._is_joined = False

    def _is_readable(self, event: EngineStored) -> bool:
        """Whether its blocks are those of this worker; gets to know the worker by them."""
        size = event.block_size if event.token_ids else self._block_tokens
        if not size or size < 0:
            self._metrics.untranslated += 1
            return False
        if self._block_tokens is None or (self._is_size_old and size != self._block_tokens):
            self._block_tokens = size
            self._kinds.clear()
        self._is_size_old = False
        if size != self._block_tokens:
            self._metrics.other_block_sizes += 1
            return False
        is_new = event.group not in self._kinds
        if is_new and len(self._kinds) >= _MAX_GROUPS:
            self._metrics.malformed += 1
            return False
        kind = event.kind or self._kinds.get(event.group, _DEFAULT_KIND)
        if not self._is_joined or self._kinds.get(event.group) != kind:
            self._kinds[event.group] = kind
            self._join()
        return True

    def _join(self) -> None:
        groups = sorted(self._kinds.items())
        self._index.join(
            InstanceDescription(
                instance_id=self.worker_id,
                incarnation=self._incarnation,
                model=self._model,
                block_tokens=self._block_tokens or 0,
                groups=tuple(GroupDescription(group, kind) for group, kind in groups),
            )
        )
        self._is_joined = True
        if not self._is_live:
            self._index.set_live(self.worker_id, is_live=False)


class EngineRanks:
    """All ranks that one stream speaks of.

    Mutable state: the ranks by number, bounded; its source guards it.
    """

    def __init__(
        self,
        index: BlockIndex,
        name: str,
        metrics: SourceMetrics,
        *,
        engine: "EngineDescription",
        claim: Callable[[str], bool],
    ) -> None:
        self._index = index
        self._name = name
        self._metrics = metrics
        self._model = engine.model
        self._block_tokens = engine.block_tokens
        self._default_rank = engine.rank
        self._claim = claim
        self._ranks: dict[int, EngineRank] = {}
        self._is_live = True

    def apply(self, batch: EngineBatch) -> None:
        """Take a batch."""
        metrics = self._metrics
        metrics.events += len(batch.events)
        metrics.unknown_events += batch.unknown_events
        metrics.malformed += batch.malformed_events
        number = self._default_rank if batch.rank is None else batch.rank
        rank = self._ranks.get(number) or self._new_rank(number)
        if rank is not None:
            rank.apply(batch.events)

    def _new_rank(self, number: int) -> EngineRank | None:
        worker_id = worker_id_of(self._name, number)
        if len(self._ranks) >= _MAX_RANKS or not self._claim(worker_id):
            self._metrics.conflicts += 1
            return None
        rank = self._ranks[number] = EngineRank(
            self._index,
            worker_id,
            self._metrics,
            model=self._model,
            block_tokens=self._block_tokens,
        )
        rank.set_live(is_live=self._is_live)
        return rank

    def worker_ids(self) -> list[str]:
        """The workers that this stream feeds."""
        return [rank.worker_id for rank in self._ranks.values()]

    def parked_count(self) -> int:
        """Events that wait for an ancestor."""
        return sum(rank.chain.parked_count for rank in self._ranks.values())

    def begin_anew(self) -> bool:
        """Forget all that the ranks said; whether there was anything."""
        had_any = [rank.begin_anew() for rank in self._ranks.values()]
        return any(had_any)

    def set_live(self, *, is_live: bool) -> None:
        """Whether what they have is to be used."""
        self._is_live = is_live
        for rank in self._ranks.values():
            rank.set_live(is_live=is_live)

    def leave(self) -> None:
        """They are gone, and all that they had."""
        for rank in self._ranks.values():
            rank.leave()
        self._ranks.clear()
