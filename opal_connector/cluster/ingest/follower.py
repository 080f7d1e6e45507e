"""Applying batches in sequence order, each once, whatever order they come in."""

from collections.abc import Callable, Iterable

from opal_connector.cluster.ingest.pending import PendingBatches
from opal_connector.cluster.ingest.selection import TierKey, events_for
from opal_connector.cluster.ingest.states import SourceLimits, SourceMetrics
from opal_connector.events.channel import Batch
from opal_connector.events.facts import KVCEvent

Apply = Callable[[Iterable[KVCEvent]], None]


class Follower:
    """What was applied, what waits for a batch before it, and what is known to exist behind.

    While it is held (its source is synchronising) everything waits. A tier whose contents came with
    a later label than where following starts skips the batches up to its label. Mutable state: the
    sequence numbers, the waiting batches, the labels, and the batches applied since a repair was
    asked for; its source guards it.
    """

    def __init__(self, apply: Apply, limits: SourceLimits, metrics: SourceMetrics) -> None:
        self._apply = apply
        self._limits = limits
        self._metrics = metrics
        self._pending: PendingBatches[Batch] = PendingBatches(
            max_batches=limits.buffered_batches, max_bytes=limits.buffered_bytes
        )
        self._labels: dict[TierKey, int] = {}
        self._highest_label = -1
        self._recent: list[Batch] | None = None
        self._recent_events = 0
        self._announced = -1
        self.applied = -1
        self.is_held = True
        self.gap_since: float | None = None

    def restart(self) -> None:
        """Forget everything: the sequence begins anew."""
        self.hold()
        self.applied = -1

    def hold(self) -> None:
        """Apply nothing until `resume`.

        What waits was published before the question that is asked next, so its answer covers it.
        """
        self.is_held = True
        self.gap_since = None
        self._announced = -1
        self._pending.clear()
        self._recent = None

    def resume(self, sequence: int, labels: dict[TierKey, int], now: float) -> None:
        """Go on behind `sequence`; some tiers are current up to their labels already."""
        self.is_held = False
        self.applied = sequence
        self._labels = {key: label for key, label in labels.items() if label > sequence}
        self._highest_label = max(self._labels.values(), default=-1)
        self._pending.drop_through(sequence)
        self._drain()
        self._look_for_gap(now)

    def offer(self, batch: Batch, size: int, now: float) -> bool:
        """Take a batch; False when it cannot be kept: too many wait already."""
        sequence = batch.sequence
        if not self.is_held and sequence == self.applied + 1:
            self._take(batch)
            if self._pending or self.gap_since is not None:
                self._drain()
                self._look_for_gap(now)
            return True
        if (not self.is_held and sequence <= self.applied) or sequence in self._pending:
            self._metrics.duplicates += 1
            return True
        if self._pending.is_full:
            return False
        self._pending.add(sequence, batch, size)
        self._look_for_gap(now)
        return True

    def announce(self, sequence: int, now: float) -> None:
        """A batch with this number exists."""
        if sequence > self._announced:
            self._announced = sequence
        if self.gap_since is None and not self.is_held and sequence > self.applied:
            self._metrics.lost_tails += not self._pending
            self._look_for_gap(now)

    def remember(self) -> None:
        """Keep what is applied from now on, until `reapply` or `forget`."""
        self._recent = []
        self._recent_events = 0

    def forget(self) -> None:
        """Keep it no longer."""
        self._recent = None

    @property
    def is_remembering(self) -> bool:
        """Whether all that was applied since `remember` is still kept."""
        return self._recent is not None

    def reapply(self, key: TierKey, label: int) -> None:
        """Apply once more what was applied behind `label` to a tier, which was replaced since.

        Facts are absolute, so the last one about a block decides, however often it is applied.
        """
        for batch in self._recent or ():
            if batch.sequence > label:
                self._apply(events_for(batch.events, key.__eq__))
        self._recent = None

    def _take(self, batch: Batch) -> None:
        sequence = batch.sequence
        events: Iterable[KVCEvent] = batch.events
        if sequence <= self._highest_label:
            labels = self._labels
            events = events_for(events, lambda key: sequence > labels.get(key, -1))
        self.applied = sequence
        self._metrics.events += len(batch.events)
        self._apply(events)
        if self._recent is not None:
            self._recent.append(batch)
            self._recent_events += 1 + len(batch.events)
            if self._recent_events > 16 * self._limits.buffered_batches:
                self._recent = None
                self._metrics.overflows += 1

    def _drain(self) -> None:
        while (batch := self._pending.pop(self.applied + 1)) is not None:
            self._metrics.reordered += 1
            self._take(batch)

    def _look_for_gap(self, now: float) -> None:
        if self.is_held:
            return
        if self._pending or self._announced > self.applied:
            if self.gap_since is None:
                self.gap_since = now
        else:
            self.gap_since = None
