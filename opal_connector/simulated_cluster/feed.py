"""The way of events from simulated instances to the KVBM: coalesced, encoded, counted."""

import time
from collections import deque
from collections.abc import Mapping, Sequence

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.publisher_stream import EventStream
from opal_connector.events import KVCEvent
from opal_connector.events.channel import FORMAT_VERSION, Heartbeat, SystemEvent, encode_message
from opal_connector.simulated_cluster.report import EventTraffic

INCARNATION = 1


class _Source:
    """One instance's channel. Mutable state: the events that are in no batch yet, until when."""

    def __init__(self, instance_id: str, model: str, block_tokens: int) -> None:
        self.instance_id = instance_id
        self.pending: list[KVCEvent] = []
        self.due = 0.0
        self.stream = EventStream(
            instance_id=instance_id,
            model=model,
            block_tokens=block_tokens,
            replay_bytes=0,
            incarnation=INCARNATION,
        )


class EventFeed:
    """Batches of every instance, as its publisher makes them, into one KVBM of the same process.

    A batch leaves `coalesce_seconds` after its first event, or when it is full, and arrives at
    once. Mutable state: the sources, which of them have a batch under way, the traffic and the time
    that the index took.
    """

    def __init__(
        self, kvbm: KVBM, *, model: str, block_tokens: int, coalesce_seconds: float
    ) -> None:
        self.traffic = EventTraffic()
        self.ingest_seconds = 0.0
        self._kvbm = kvbm
        self._model = model
        self._block_tokens = block_tokens
        self._coalesce_seconds = coalesce_seconds
        self._sources: dict[str, _Source] = {}
        self._under_way: deque[tuple[float, _Source]] = deque()  # by when they are due

    def hear(self, instance_id: str, events: Sequence[KVCEvent], now: float) -> None:
        """An instance says what has come and gone."""
        source = self._sources.get(instance_id)
        if source is None:
            source = _Source(instance_id, self._model, self._block_tokens)
            self._sources[instance_id] = source
        if source.pending and source.due <= now:
            self._flush(source)
        for event in events:
            if not source.pending:
                source.due = now + self._coalesce_seconds
                self._under_way.append((source.due, source))
            source.stream.hear(event)
            source.pending.append(event)
            if source.stream.is_full:
                self._flush(source)

    def deliver(self, now: float = float("inf")) -> None:
        """Let every batch arrive that is due by now."""
        while self._under_way and self._under_way[0][0] <= now:
            due, source = self._under_way.popleft()
            if source.due == due:  # else that batch has left, and this is another
                self._flush(source)

    def count_heartbeats(
        self,
        systems: Mapping[str, SystemEvent],
        *,
        duration_seconds: float,
        heartbeat_seconds: float,
    ) -> None:
        """Add what the instances say besides events: `systems` are their loads at the end."""
        each = int(duration_seconds / heartbeat_seconds)
        for instance_id, system in systems.items():
            source = self._sources.get(instance_id)
            beat = Heartbeat(
                FORMAT_VERSION,
                instance_id,
                INCARNATION,
                -1 if source is None else source.stream.sequence,
                duration_seconds,
                0,
                system,
                () if source is None else source.stream.digests(lambda _tier: True),
            )
            self.traffic.heartbeats += each
            self.traffic.heartbeat_bytes += each * len(encode_message(beat))

    def _flush(self, source: _Source) -> None:
        payload = source.stream.flush()
        if payload is None:  # it left before, because it was full
            return
        self.traffic.batches += 1
        self.traffic.events += len(source.pending)
        self.traffic.bytes += len(payload)
        began = time.perf_counter()
        self._kvbm.process_kvc_events(source.instance_id, source.pending)
        self.ingest_seconds += time.perf_counter() - began
        source.pending = []
