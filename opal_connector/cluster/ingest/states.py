"""What every source has: a state, figures, and limits."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

import msgspec

from opal_connector.events.channel import InstanceDescription, SystemEvent, TierDigest
from opal_connector.events.facts import KVCEvent, ObjectFact


class SourceState(StrEnum):
    """Where a source stands.

    Only what a LIVE source said is known to be all and true; one in GAP or SYNCING is catching up;
    what a STALE one said is kept and not used.
    """

    INIT = "init"
    SYNCING = "syncing"
    LIVE = "live"
    GAP = "gap"
    STALE = "stale"


class SourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a source waits, and how much it keeps meanwhile."""

    reorder_seconds: float = 0.1
    request_seconds: float = 2.0
    request_attempts: int = 2
    first_hold_seconds: float = 0.5
    longest_hold_seconds: float = 10.0
    stale_heartbeats: float = 3.0
    stale_seconds: float = 3.0
    quiet_seconds: float = 5.0  # of an engine's stream, until its last batch is checked
    buffered_batches: int = 4_096
    buffered_bytes: int = 64 << 20
    contents_bytes: int = 1 << 30
    remembered_payloads: int = 4_096


class SourceMetrics(msgspec.Struct, kw_only=True):
    """Counters of one source since it was added; `seconds` is the time in each state.

    `repaired_buckets` were found different by a heartbeat; `purges` are the times when all that the
    source had said was given up because nothing could make it whole again. `late` are messages of
    an ended incarnation or an answered question. The last four are of engines' own streams.
    """

    batches: int = 0
    events: int = 0
    bytes: int = 0
    heartbeats: int = 0
    duplicates: int = 0
    reordered: int = 0
    gaps: int = 0
    lost_tails: int = 0
    replays: int = 0
    replayed_batches: int = 0
    snapshots: int = 0
    contents: int = 0
    digest_mismatches: int = 0
    repaired_buckets: int = 0
    repaired_blocks: int = 0
    overflows: int = 0
    purges: int = 0
    restarts: int = 0
    lost_heartbeats: int = 0
    late: int = 0
    refused: int = 0
    timeouts: int = 0
    malformed: int = 0
    conflicts: int = 0
    faults: int = 0
    connections: int = 0
    unknown_events: int = 0
    other_block_sizes: int = 0
    untranslated: int = 0
    parked: int = 0
    seconds: dict[SourceState, float] = msgspec.field(
        default_factory=lambda: dict.fromkeys(SourceState, 0.0)
    )


class Replaced(Protocol):
    """What a replacement changed."""

    @property
    def added_blocks(self) -> int:
        """Blocks that were not known."""

    @property
    def removed_blocks(self) -> int:
        """Blocks that are not there any more."""


class BlockIndex(Protocol):
    """What the sources write to: `KVBM`, as far as they use it."""

    def join(self, description: InstanceDescription) -> None:
        """A new, changed or restarted worker."""

    def remove_worker(self, worker_id: str) -> None:
        """It is gone, and all that it had."""

    def set_live(self, worker_id: str, *, is_live: bool) -> None:
        """Whether what it has is to be used."""

    def process_kvc_events(self, worker_id: str, events: Iterable[KVCEvent]) -> None:
        """Facts in order."""

    def process_system_events(self, worker_id: str, events: Iterable[SystemEvent]) -> None:
        """Its load."""

    def clear_tier(self, worker_id: str, tier: str, group: int | None = None) -> int:
        """All blocks leave a tier; how many did."""

    def digests(self, worker_id: str) -> tuple[TierDigest, ...]:
        """Fingerprints of what is known of it."""

    def replace(
        self,
        worker_id: str,
        group: int,
        tier: str,
        facts: Iterable[ObjectFact],
        buckets: bytes = b"",
        *,
        keep_others: bool = False,
    ) -> Replaced:
        """Make a tier, or some buckets of it, what the facts say."""
