"""What an engine's events mean for the index: one worker per rank, one chain per worker."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from opal_connector.cluster.engine_chain import EngineChain
from opal_connector.cluster.engine_lineage import StoredBlocks
from opal_connector.cluster.ingest.engine_groups import EngineGroups, GroupNews
from opal_connector.cluster.ingest.states import BlockIndex, SourceMetrics
from opal_connector.cluster.ingest.vllm_wire import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineRemoved,
    EngineStored,
)
from opal_connector.events.channel import InstanceDescription
from opal_connector.events.facts import DEVICE_TIER, Delete, Insert

_MAX_RANKS: Final = 1_024
_EARLY_TOKENS: Final = 1 << 17
_EARLY_EVENT_TOKENS: Final = 256  # what an event counts for besides its tokens


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


class EarlyEvents:
    """The first events of a stream, to be read anew when a group of smaller blocks turns up.

    All groups speak in the first steps, so a few events are enough. Mutable state: the events,
    none any more once they were too many.
    """

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self._room = _EARLY_TOKENS

    def add(self, event: EngineEvent) -> None:
        """Keep an event, as long as all can be kept."""
        if self._room <= 0:
            return
        tokens = len(event.token_ids) if isinstance(event, EngineStored) else 0
        self._room -= tokens + _EARLY_EVENT_TOKENS
        self.events.append(event)
        if self._room <= 0:
            self.events.clear()


class EngineRank:
    """One rank of one engine.

    Mutable state: its chain, its first events, and what is known of its groups. Its source guards
    it.
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
        self._groups = EngineGroups(block_tokens)
        self._early = EarlyEvents()
        self._incarnation = 0
        self._is_live = True
        self._is_joined = False
        self.worker_id = worker_id
        self.chain = self._new_chain()

    def apply(self, events: list[EngineEvent]) -> None:
        """Take events in order."""
        facts: list[Insert | Delete] = []
        for event in events:
            if isinstance(event, EngineStored) and not self._is_readable(event, facts):
                continue
            facts += self._facts_of(event)
            self._early.add(event)
        self._say(facts)

    def begin_anew(self) -> bool:
        """Forget all that it said; whether there was anything."""
        self._groups.are_old = True
        self._early = EarlyEvents()
        self.chain = self._new_chain()
        self._incarnation += 1
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

    def _facts_of(self, event: EngineEvent) -> Sequence[Insert | Delete]:
        match event:
            case EngineStored():
                return self.chain.stored(
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
                return self.chain.removed(event.group, event.tier, event.block_hashes)
            case EngineCleared():
                return self.chain.cleared(DEVICE_TIER)

    def _is_readable(self, event: EngineStored, before: list[Insert | Delete]) -> bool:
        """Whether its blocks can be read; gets to know the worker by them.

        `before` is what was not written yet of the events before.
        """
        news = self._groups.see(event)
        match news:
            case GroupNews.NO_SIZE:
                self._metrics.untranslated += 1
                return False
            case GroupNews.OTHER_SIZE:
                self._metrics.other_block_sizes += 1
                return False
            case GroupNews.TOO_MANY:
                self._metrics.malformed += 1
                return False
            case GroupNews.LARGER:
                before += self.chain.forget_group(event.group)
            case GroupNews.NOTHING | GroupNews.DESCRIBED:
                pass
        if self._groups.unit_tokens != self._unit_tokens:
            # What was hashed in larger steps has other digests now.
            self._incarnation += self._is_joined
            self.chain = self._new_chain()
            before[:] = [fact for early in self._early.events for fact in self._facts_of(early)]
            self._join()
        elif news is not GroupNews.NOTHING or not self._is_joined:
            self._say(before)
            before.clear()
            self._join()
        return True

    def _say(self, facts: list[Insert | Delete]) -> None:
        if facts and self._is_joined:
            self._index.process_kvc_events(self.worker_id, facts)

    def _new_chain(self) -> EngineChain:
        self._unit_tokens = self._groups.unit_tokens
        return EngineChain(unit_tokens=self._unit_tokens, sizes=self._groups.sizes)

    def _join(self) -> None:
        self._index.join(
            InstanceDescription(
                instance_id=self.worker_id,
                incarnation=self._incarnation,
                model=self._model,
                block_tokens=self._groups.unit_tokens or 0,
                groups=self._groups.described(),
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
