"""Keeping what is known of one instance equal to what it holds, tier by tier."""

from collections import deque
from collections.abc import Iterable

import msgspec

from opal_connector.cluster.ingest.answers import ContentsParts, ReplayParts
from opal_connector.cluster.ingest.conversation import Conversation
from opal_connector.cluster.ingest.follower import Follower
from opal_connector.cluster.ingest.selection import TierKey, Wanted, by_tier, differences
from opal_connector.cluster.ingest.states import BlockIndex, SourceLimits, SourceMetrics
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskDigests,
    AskReplay,
    Batch,
    Contents,
    DigestsNow,
    Heartbeat,
    InstanceDescription,
    MessageError,
    Question,
    Replay,
    TierDigest,
    decode_published,
)
from opal_connector.events.facts import DEVICE_TIER, KVCEvent

_LONGEST_COMPARE_HOLD = 60.0


class TierSync:
    """The facts of one incarnation: whole contents first, then batches, then repairs.

    A synchronisation asks for digests, then for the contents of what differs from them, and goes on
    with the batches behind the digests. Mutable state: the plan of a synchronisation or of repairs,
    the parts of the open answer, and the follower; the machine that owns it guards it.
    """

    def __init__(
        self,
        index: BlockIndex,
        talk: Conversation,
        limits: SourceLimits,
        metrics: SourceMetrics,
    ) -> None:
        self._index = index
        self._talk = talk
        self._limits = limits
        self._metrics = metrics
        self._description: InstanceDescription | None = None
        self._follower = Follower(self._apply, limits, metrics)
        self._base: int | None = None  # the label of the digests of a synchronisation
        self._labels: dict[TierKey, int] = {}
        self._plan: deque[Wanted] = deque()
        self._contents = ContentsParts(limits.contents_bytes)
        self._replay = ReplayParts(limits.contents_bytes)
        self._replay_from = -1
        self._mismatches = 0
        self._compare_at = float("-inf")
        self.is_compared = False
        self.is_syncing = True

    # ---- what it is ----

    @property
    def applied(self) -> int:
        """The last batch that was applied."""
        return self._follower.applied

    @property
    def has_gap(self) -> bool:
        """Whether a batch is missing."""
        return self._follower.gap_since is not None

    @property
    def is_equal(self) -> bool:
        """Whether the last comparison found no difference."""
        return self._mismatches == 0

    # ---- what moves it ----

    def start(self, description: InstanceDescription) -> None:
        """Follow another incarnation."""
        self._follower.restart()
        self._mismatches = 0
        self._compare_at = float("-inf")
        self.describe(description)
        self.begin()

    def describe(self, description: InstanceDescription) -> None:
        """Take a changed description of the same incarnation."""
        self._description = description

    def begin(self) -> None:
        """Begin a synchronisation, from digests on."""
        self.is_syncing = True
        self.is_compared = False
        self._base = None
        self._labels.clear()
        self._plan.clear()
        self._follower.hold()

    def must_compare(self) -> None:
        """What is known counts again only after it was compared."""
        self.is_compared = False
        self._compare_at = float("-inf")

    def offer(self, batch: Batch, size: int, now: float) -> bool:
        """Take a live batch; False when too many wait."""
        had_gap = self.has_gap
        is_kept = self._follower.offer(batch, size, now)
        self._metrics.gaps += self.has_gap and not had_gap
        return is_kept

    def on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Find a lost last batch, or compare when all was applied."""
        had_gap = self.has_gap
        self._follower.announce(heartbeat.sequence, now)
        self._metrics.gaps += self.has_gap and not had_gap
        if heartbeat.sequence != self.applied or self._plan or now < self._compare_at:
            return
        self._compare(heartbeat, now)

    def on_asked(self, question: Question) -> None:
        """Prepare for the answer to a question that is sent."""
        if isinstance(question, AskContents):
            self._contents = ContentsParts(self._limits.contents_bytes)
            if not self.is_syncing:
                self._follower.remember()
        elif isinstance(question, AskReplay):
            self._replay = ReplayParts(self._limits.contents_bytes)

    def on_reply(self, reply: Replay | DigestsNow | Contents, now: float) -> bool:
        """Take an answer to the open question; whether a synchronisation ended with it."""
        asked = self._talk.open
        if isinstance(reply, Replay) and isinstance(asked, AskReplay):
            self._on_replay(reply, now)
        elif isinstance(reply, DigestsNow) and isinstance(asked, AskDigests):
            self._on_digests(reply)
        elif isinstance(reply, Contents) and isinstance(asked, AskContents):
            self._on_contents(reply)
        else:
            self._metrics.malformed += 1
        if not self.is_syncing or self._base is None or self._plan:
            return False
        self.is_syncing = False
        self.is_compared = True
        self._metrics.snapshots += 1
        self._follower.resume(self._base, self._labels, now)
        return True

    def next_question(self, now: float) -> Question | None:
        """What is needed next, None where nothing is; the request id is filled in later."""
        if self.is_syncing and self._base is None:
            return AskDigests(FORMAT_VERSION, 0)
        since = self._follower.gap_since
        if since is not None and now - since >= self._limits.reorder_seconds:
            self._replay_from = self.applied + 1
            return AskReplay(FORMAT_VERSION, 0, self._replay_from)
        if self._plan:
            wanted = self._plan[0]
            return AskContents(FORMAT_VERSION, 0, *wanted.key, wanted.buckets)
        return None

    def drop_volatile(self) -> None:
        """Forget what no process keeps over its end."""
        persistent = self._persistent()
        for group, tier in by_tier(self._index.digests(self._worker)):
            if tier not in persistent:
                self._index.clear_tier(self._worker, tier, group)

    def purge(self) -> bool:
        """Forget everything; whether there was anything."""
        known = by_tier(self._index.digests(self._worker))
        for group, tier in known:
            self._index.clear_tier(self._worker, tier, group)
        return bool(known)

    # ---- answers ----

    def _on_replay(self, reply: Replay, now: float) -> None:
        for payload in reply.batches:
            batch = self._replayed(payload, reply.incarnation)
            if batch is None or batch.sequence <= self.applied:
                continue
            self._metrics.replayed_batches += 1
            if not self._follower.offer(batch, len(payload), now):
                self._overflow()
                return
        try:
            is_whole = self._replay.add(reply)
        except MemoryError:
            self._overflow()
            return
        if is_whole:
            self._metrics.replays += 1
            self._talk.close()
            if self.has_gap and self.applied < self._replay_from:
                self.begin()  # the first missing batch is not kept any more

    def _overflow(self) -> None:
        self._metrics.overflows += 1
        self._talk.close()
        self.begin()

    def _replayed(self, payload: bytes, incarnation: int) -> Batch | None:
        try:
            batch = decode_published(payload)
        except MessageError:
            batch = None
        if isinstance(batch, Batch) and batch.incarnation == incarnation:
            return batch
        self._metrics.malformed += 1
        return None

    def _on_digests(self, reply: DigestsNow) -> None:
        self._talk.close()
        theirs = by_tier(reply.digests)
        self._base = reply.sequence
        self._plan.extend(self._differences(theirs, with_incomplete=True))

    def _on_contents(self, reply: Contents) -> None:
        wanted = self._plan[0]
        if wanted.key[1] not in self._persistent():
            reply = msgspec.structs.replace(reply, is_complete=True)
        try:
            is_whole = self._contents.add(reply)
        except MemoryError:
            self._metrics.overflows += 1
            self._index.clear_tier(self._worker, wanted.key[1], wanted.key[0])
            self._plan.popleft()
            self._talk.close()
            return
        if not is_whole or self._contents.sequence is None:
            return
        self._talk.close()
        self._plan.popleft()
        if not self.is_syncing and not self._follower.is_remembering:
            return  # too much happened since the question; the next heartbeat finds it again
        contents, label = self._contents, self._contents.sequence
        self._contents = ContentsParts(self._limits.contents_bytes)
        self._metrics.contents += 1
        replaced = self._index.replace(
            self._worker,
            *wanted.key,
            contents.facts,
            wanted.buckets,
            keep_others=not contents.is_complete,
        )
        if not contents.is_complete and not contents.facts:
            self._mismatches = 0  # it is only still to be looked through
            self._compare_at = float("-inf")
        if self.is_syncing:
            if not wanted.buckets:
                self._labels[wanted.key] = label
            return
        self._metrics.repaired_buckets += len(wanted.buckets) or 256
        self._metrics.repaired_blocks += replaced.added_blocks + replaced.removed_blocks
        self._follower.reapply(wanted.key, label)
        self.is_compared = self.is_compared or not self._plan

    # ---- comparing ----

    def _compare(self, heartbeat: Heartbeat, now: float) -> None:
        wanted = self._differences(by_tier(heartbeat.digests), with_incomplete=False)
        if not wanted:
            self._mismatches = 0
            self.is_compared = True
            return
        # What differs again and again (an index that is too small) must not be asked for each time.
        self._compare_at = now + min(0.5 * 2**self._mismatches, _LONGEST_COMPARE_HOLD)
        self._mismatches = min(self._mismatches + 1, 16)
        self._metrics.digest_mismatches += 1
        self._plan.extend(wanted)

    def _differences(
        self, theirs: dict[TierKey, TierDigest], *, with_incomplete: bool
    ) -> list[Wanted]:
        ours = by_tier(self._index.digests(self._worker))
        persistent = self._persistent()
        # Of what no process keeps over its end nobody can know more than the process itself: where
        # it does not know all, what it does not name is still not to be counted on.
        theirs = {
            key: digest
            if key[1] in persistent
            else msgspec.structs.replace(digest, is_complete=True)
            for key, digest in theirs.items()
        }
        described = self._described()
        for key in [key for key in ours if key not in theirs and key[1] not in described]:
            self._index.clear_tier(self._worker, key[1], key[0])  # no such tier any more
            del ours[key]
        return differences(ours, theirs, with_incomplete=with_incomplete)

    def _described(self) -> set[str]:
        tiers = self._description.tiers if self._description is not None else ()
        return {DEVICE_TIER, *(tier.name for tier in tiers)}

    def _persistent(self) -> set[str]:
        tiers = self._description.tiers if self._description is not None else ()
        return {tier.name for tier in tiers if tier.is_persistent}

    @property
    def _worker(self) -> str:
        return self._description.instance_id if self._description is not None else ""

    def _apply(self, events: Iterable[KVCEvent]) -> None:
        self._index.process_kvc_events(self._worker, events)
