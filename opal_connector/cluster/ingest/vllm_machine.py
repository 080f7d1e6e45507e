"""One engine's own event stream, as a state machine without sockets and clocks.

The stream has sequence numbers and an optional replay, and neither incarnations nor contents. So a
payload that differs from the one seen under its number tells a restart; a replay begins at the last
batch that was applied, to see that it is the same engine's; and what cannot be replayed can only
be given up.
"""

import logging
from collections.abc import Callable

import xxhash

from opal_connector.cluster.ingest.pending import PendingBatches
from opal_connector.cluster.ingest.states import (
    BlockIndex,
    SourceLimits,
    SourceMetrics,
    SourceState,
)
from opal_connector.cluster.ingest.vllm_ranks import EngineDescription, EngineRanks
from opal_connector.cluster.ingest.vllm_replay import AskReplayFrom, OpenReplay
from opal_connector.cluster.ingest.vllm_wire import decode_engine_batch
from opal_connector.events.channel import MessageError
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)


class VllmMachine:
    """The state of one engine's stream and all that moves it.

    Mutable state: how far the stream was applied, what waits, the open replay, and the ranks' facts
    (`EngineRanks`). One thread calls it; every call returns what is to be asked now.
    """

    def __init__(
        self,
        index: BlockIndex,
        name: str,
        *,
        has_replay: bool,
        engine: EngineDescription | None = None,
        claim: Callable[[str], bool] = bool,
        limits: SourceLimits | None = None,
        warnings: RateLimitedWarnings | None = None,
    ) -> None:
        self._name = name
        self._has_replay = has_replay
        self._limits = limits or SourceLimits()
        self._warnings = warnings or RateLimitedWarnings(logger)
        self.metrics = SourceMetrics()
        self.ranks = EngineRanks(
            index, name, self.metrics, engine=engine or EngineDescription(), claim=claim
        )
        self._pending: PendingBatches[bytes] = PendingBatches(
            max_batches=self._limits.buffered_batches, max_bytes=self._limits.buffered_bytes
        )
        self._seen: dict[int, int] = {}  # fingerprints of the last payloads
        self._applied: int | None = None  # None: nothing yet, whatever comes is the first
        self._is_connected = False
        self._is_verified = True
        self._was_connected = False
        self._was_disconnected = False
        self._gap_since: float | None = None
        self._replay = OpenReplay(self._limits)
        self._heard_at = 0.0
        self._accounted_at: float | None = None
        self._asks: list[AskReplayFrom] = []

    # ---- what it is ----

    @property
    def state(self) -> SourceState:
        """Where this source stands."""
        if not self._was_connected:
            return SourceState.INIT
        if not self._is_connected or not self._is_verified:
            return SourceState.STALE
        if self._replay.is_open and not self._replay.is_poll and self._gap_since is None:
            return SourceState.SYNCING
        return SourceState.LIVE if self._gap_since is None else SourceState.GAP

    @property
    def applied(self) -> int | None:
        """The last batch that was applied, None before there was one."""
        return self._applied if self._applied is None or self._applied >= 0 else None

    @property
    def is_settled(self) -> bool:
        """Whether it is LIVE and waits for nothing."""
        return self.state is SourceState.LIVE and not self._replay.is_open

    # ---- what moves it ----

    def on_connected(self, now: float) -> list[AskReplayFrom]:
        """The stream is there, for the first time or again; it may be another process."""
        self._account(now)
        # A message may have come before its connection was told of.
        if not self._is_connected or self._was_disconnected:
            self._connect(now)
        return self._taken()

    def _connect(self, now: float) -> None:
        is_return = self._was_connected
        self._is_connected = self._was_connected = True
        self.metrics.connections += 1
        if self._has_replay:
            self._is_verified = self._applied is None
            self._ask_replay(now)
        elif is_return and self._applied is not None:
            self._pending.clear()
            self._give_up("it was away, and nobody can tell what happened meanwhile")
        if self._is_verified:
            self.ranks.set_live(is_live=True)

    def on_disconnected(self, now: float) -> list[AskReplayFrom]:
        """The stream is gone: what it said is kept and not used."""
        self._account(now)
        self._is_connected = False
        self._was_disconnected = True
        self._replay.close()
        self._pending.clear()  # it may be of a process that is no more
        self._gap_since = None
        self.ranks.set_live(is_live=False)
        return self._taken()

    def on_message(self, sequence: int, payload: bytes, now: float) -> list[AskReplayFrom]:
        """Take a live batch."""
        self._account(now)
        self.metrics.batches += 1
        self.metrics.bytes += len(payload)
        self._heard_at = now
        if not self._is_connected:
            self._connect(now)
        if not self._replay.is_open or self._replay.is_poll:
            self._take(sequence, payload, now)
        else:
            self._wait(sequence, payload)
        return self._taken()

    def on_replayed(self, sequence: int, payload: bytes, now: float) -> list[AskReplayFrom]:
        """Take a batch of the open replay."""
        self._account(now)
        self.metrics.bytes += len(payload)
        if not self._replay.is_open:
            self.metrics.late += 1
            return self._taken()
        self.metrics.replayed_batches += 1
        if self._replay.heard(now):
            self._begin_replayed(sequence)
        if self._applied is None or sequence > self._applied:
            self.metrics.lost_tails += self._replay.is_poll and not self._replay.has_progress
            self._replay.has_progress = True
        self._take(sequence, payload, now)
        return self._taken()

    def on_replay_end(self, now: float) -> list[AskReplayFrom]:
        """The open replay has ended."""
        self._account(now)
        if not self._replay.is_open:
            self.metrics.late += 1
            return self._taken()
        self.metrics.replays += 1
        if self._replay.is_empty and self._applied is not None and self._applied >= 0:
            # Not even the last batch that was seen: this engine has not come that far yet.
            self._restart(keep_waiting=True)
            self._ask_replay(now)
        else:
            self._end_replay(now, is_whole=True)
        return self._taken()

    def on_malformed(self, size: int, now: float) -> list[AskReplayFrom]:
        """Note frames that are no message of this stream."""
        self._account(now)
        self.metrics.bytes += size
        self.metrics.malformed += 1
        return self._taken()

    def on_fault(self, now: float) -> list[AskReplayFrom]:
        """Begin again after a batch could not be applied."""
        self._account(now)
        self.metrics.faults += 1
        self._pending.clear()
        self._give_up("a batch could not be applied")
        if self._has_replay and self._is_connected:
            self._ask_replay(now)
        return self._taken()

    def on_tick(self, now: float) -> list[AskReplayFrom]:
        """Let time pass."""
        self._account(now)
        self.metrics.parked = self.ranks.parked_count()
        limits = self._limits
        if self._replay.is_open:
            if self._replay.is_overdue(now):
                self.metrics.timeouts += 1
                if self._replay.may_try_again():
                    self._send_replay(now)
                else:
                    self._end_replay(now, is_whole=False)
        elif self._gap_since is not None and now - self._gap_since >= limits.reorder_seconds:
            if self._has_replay and self._is_connected:
                self._ask_replay(now)
            else:
                self._rebase("batches were lost, and it has no replay")
        elif self._has_replay and self._is_connected and self._is_quiet(now):
            self._ask_replay(now, is_poll=True)
        return self._taken()

    def _is_quiet(self, now: float) -> bool:
        """Whether it is time to see whether the last batch was lost, or the engine replaced."""
        heard_at = max(self._heard_at, self._replay.heard_at)
        return now - heard_at >= self._limits.quiet_seconds

    # ---- applying in order ----

    def _take(self, sequence: int, payload: bytes, now: float) -> None:
        applied = self._applied
        if applied is None or sequence == applied + 1:
            self._apply(sequence, payload)
            self._drain(now)
        elif sequence > applied and self._pending.is_full and not self._has_replay:
            self._rebase("batches were lost, and it has no replay")
            self._take(sequence, payload, now)
        elif sequence > applied:
            self._wait(sequence, payload)
            if self._gap_since is None and not self._replay.is_open:
                self.metrics.gaps += 1
                self._gap_since = now
        elif self._seen.get(sequence) == xxhash.xxh3_64_intdigest(payload):
            self.metrics.duplicates += not self._replay.is_open
        else:
            self._restart()
            if self._has_replay:
                self._ask_replay(now)  # it says what is true, and has this one too
            else:
                self._apply(sequence, payload)

    def _wait(self, sequence: int, payload: bytes) -> None:
        if sequence in self._pending:
            self.metrics.duplicates += 1
        elif self._pending.is_full:
            self.metrics.overflows += 1  # it is missed later, and asked for again
        else:
            self._pending.add(sequence, payload, len(payload))

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._applied = sequence
        self._seen[sequence] = xxhash.xxh3_64_intdigest(payload)
        if len(self._seen) > self._limits.remembered_payloads:
            del self._seen[next(iter(self._seen))]
        try:
            batch = decode_engine_batch(payload)
        except MessageError as error:
            self.metrics.malformed += 1
            self._give_up(f"a batch cannot be read ({error})")
            self._applied = sequence
            self._seen[sequence] = xxhash.xxh3_64_intdigest(payload)
            return
        self.ranks.apply(batch)

    def _drain(self, now: float) -> None:
        """Apply what waited and follows now; begin at the lowest where nothing was applied."""
        if self._applied is None:
            lowest = self._pending.lowest()
            if lowest is None:
                return
            self._applied = lowest - 1
        while (payload := self._pending.pop(self._applied + 1)) is not None:
            if self._gap_since is not None:
                self.metrics.reordered += 1
            self._apply(self._applied + 1, payload)
        if not self._replay.is_open:
            self._look_for_gap(now)

    def _look_for_gap(self, now: float) -> None:
        if not self._pending:
            self._gap_since = None
        elif self._gap_since is None:
            self.metrics.gaps += 1
            self._gap_since = now

    # ---- replays ----

    def _ask_replay(self, now: float, *, is_poll: bool = False) -> None:
        self._replay.begin(in_gap=bool(self._pending), is_poll=is_poll)
        self._send_replay(now)

    def _send_replay(self, now: float) -> None:
        self._replay.send(now)
        # One that is known already, to see whether the engine is still the same.
        self._asks = [AskReplayFrom(max(self._applied or 0, 0))]

    def _begin_replayed(self, sequence: int) -> None:
        """See where a replay begins: at what is known, or too late."""
        if self._applied is None or self._applied < 0 or sequence <= self._applied:
            return
        self._give_up("what it replays does not reach back to what is known")

    def _end_replay(self, now: float, *, is_whole: bool) -> None:
        self._replay.close()
        if self._applied is None and is_whole and not self._pending:
            self._applied = -1  # it has published nothing so far
        if not is_whole and not self._is_verified:
            self._rebase("it came back and does not replay")
        if not self._discard_old(now):
            return
        self._is_verified = True
        self._drain(now)
        is_lost = self._replay.asked_in_gap and not self._replay.has_progress
        if self._pending and (not is_whole or is_lost):
            self._rebase("batches were lost, and its replay does not have them")
        elif self._pending:
            self._ask_replay(now)
        self.ranks.set_live(is_live=self._is_connected)

    def _discard_old(self, now: float) -> bool:
        """Drop what waited and was replayed meanwhile; False if it is another engine's."""
        while self._applied is not None:
            lowest = self._pending.lowest()
            if lowest is None or lowest > self._applied:
                break
            payload = self._pending.pop(lowest)
            if payload is not None:
                self._take(lowest, payload, now)
                if self._replay.is_open:
                    return False
        return True

    # ---- giving up ----

    def _restart(self, *, keep_waiting: bool = False) -> None:
        """It is another process now: nothing that the old one said is true."""
        self.metrics.restarts += 1
        if not keep_waiting:
            self._pending.clear()
        self._reset()

    def _give_up(self, reason: str) -> None:
        """Forget what was said, and say so."""
        if self._reset():
            self.metrics.purges += 1
            self._warnings.warn(
                f"purge {self._name}",
                "what %s has is not known any more: %s; it is credited with what it stores "
                "from now on",
                self._name,
                reason,
            )

    def _rebase(self, reason: str) -> None:
        """Give up what was known, and go on with what waits."""
        waiting = self._pending
        self._pending = PendingBatches(
            max_batches=self._limits.buffered_batches, max_bytes=self._limits.buffered_bytes
        )
        self._give_up(reason)
        while (lowest := waiting.lowest()) is not None:
            payload = waiting.pop(lowest)
            if payload is None:
                break
            if self._applied is not None and lowest != self._applied + 1:
                self._give_up(reason)
            self._apply(lowest, payload)

    def _reset(self) -> bool:
        self._applied = None
        self._gap_since = None
        self._is_verified = True
        self._seen.clear()
        return self.ranks.begin_anew()

    # ---- housekeeping ----

    def _taken(self) -> list[AskReplayFrom]:
        asks, self._asks = self._asks, []
        return asks

    def _account(self, now: float) -> None:
        if self._accounted_at is not None:
            self.metrics.seconds[self.state] += max(0.0, now - self._accounted_at)
        self._accounted_at = now
