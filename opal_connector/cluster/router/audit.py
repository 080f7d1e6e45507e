"""What was expected of instances' caches against what they had, and how far to trust them."""

import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from opal_connector.cluster.router.admission import Placement
from opal_connector.cluster.router.config import AuditConfig
from opal_connector.cluster.router.histogram import Histogram
from opal_connector.cluster.router.instances import Instance
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

DIFFERENCE_BOUNDS: Final = (
    *(-16_384.0, -4_096.0, -1_024.0, -256.0, -64.0, -16.0, -1.0),
    *(0.0, 15.0, 63.0, 255.0, 1_023.0, 4_095.0, 16_383.0),
)


class WorkerAudit(msgspec.Struct):
    """What came of one worker's requests.

    `differences` are of actual minus expected tokens. `trust` is the moving average of the part of
    what was expected for sure that was there.
    """

    requests: int = 0
    expected_tokens: int = 0
    actual_tokens: int = 0
    prompt_tokens: int = 0
    trust: float = 1.0
    resyncs: int = 0
    differences: Histogram = msgspec.field(default_factory=lambda: Histogram(DIFFERENCE_BOUNDS))
    since_resync: int = 0
    resynced_at: float = float("-inf")


class Audit:
    """Compares, and asks for a comparison of the books when an instance cannot be trusted.

    Mutable state: the sums by worker. The loop's thread alone uses it.
    """

    def __init__(self, config: AuditConfig, resync: Callable[[Instance], None]) -> None:
        self._config = config
        self._resync = resync
        self._warnings = RateLimitedWarnings(logger)
        self.workers: dict[str, WorkerAudit] = {}
        self.uncounted = 0

    def see(self, placement: Placement, cached_tokens: int | None) -> None:
        """A request was answered; None where the engine does not say what it had."""
        decision = placement.decision
        if cached_tokens is None or not decision.prefixes:
            self.uncounted += 1
            return
        found = self.workers.setdefault(decision.worker_id, WorkerAudit())
        found.requests += 1
        found.expected_tokens += decision.expected_tokens
        found.actual_tokens += cached_tokens
        found.prompt_tokens += decision.prompt_tokens
        found.differences.see(cached_tokens - decision.expected_tokens)
        self._weigh(placement, found, cached_tokens)

    def forget(self, worker_id: str) -> None:
        """A worker is gone."""
        self.workers.pop(worker_id, None)

    def _weigh(self, placement: Placement, found: WorkerAudit, cached_tokens: int) -> None:
        decision, config = placement.decision, self._config
        block_tokens = max(
            prefix.places.alignment_tokens(decision.worker_id) for prefix in decision.prefixes
        )
        # What other requests are still computing is not sure, and of a whole match the engine
        # computes the last block once more.
        sure = min(
            decision.expected_tokens - decision.predicted_tokens,
            decision.prompt_tokens - block_tokens,
        )
        if sure <= 0:
            return
        found.since_resync += 1
        found.trust += config.weight * (min(cached_tokens / sure, 1.0) - found.trust)
        now = time.monotonic()
        is_due = now - found.resynced_at >= config.resync_seconds
        if found.trust >= config.least_trust or found.since_resync < config.least_requests:
            return
        if is_due:
            found.resyncs += 1
            found.since_resync = 0
            found.resynced_at = now
            self._warnings.warn(
                f"trust {decision.worker_id}",
                "%s had only %.0f %% of what its events promised; comparing anew",
                decision.worker_id,
                100 * found.trust,
            )
            self._resync(placement.instance)
