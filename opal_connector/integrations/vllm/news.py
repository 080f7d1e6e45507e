"""What workers and other instances report, written into the books a little at every step."""

import logging
from collections import deque
from collections.abc import Callable, Sequence

from opal_connector.integrations.vllm.block_holds import BlockHolds
from opal_connector.integrations.vllm.guard import contained
from opal_connector.integrations.vllm.messages import OpalStepResults
from opal_connector.managers import OpalKVCacheManager
from opal_connector.managers.jobs import OpenJob
from opal_connector.sharing import SharedTierLink
from opal_connector.transfers import InventoryPage, JobResult, TierHealth

logger = logging.getLogger(__name__)

_ADOPTION_SECONDS = 0.001  # of one step, for objects that were there before


class News:
    """Results, inventories and health of all ranks, and what is heard of a shared tier.

    Mutable state: results that could not be booked and pages that were not entered yet; used by
    the engine core's thread only.
    """

    def __init__(
        self,
        manager: OpalKVCacheManager,
        holds: BlockHolds | None,
        shared: SharedTierLink | None,
        clock: Callable[[], float],
        *,
        job_ended: Callable[[OpenJob, JobResult], None] | None = None,
    ) -> None:
        self._job_ended = job_ended
        self._manager = manager
        self._holds = holds
        self._shared = shared
        self._clock = clock
        self._unbooked: list[JobResult] = []
        self._pages: deque[InventoryPage] = deque()

    @property
    def has_more(self) -> bool:
        """Whether something waits for the next step."""
        is_waiting = self._shared is not None and self._shared.is_waiting
        return bool(self._pages or self._unbooked) or is_waiting

    def take(self, news: OpalStepResults) -> None:
        """Book what came in this step."""
        for rank, health in news.health.items():
            with contained("update_connector_output"):
                self._report_health(rank, health)
        for result in news.results:
            if self._holds is not None:
                self._holds.answer(result.job_id)
            with contained("update_connector_output"):
                self._book(result)
        self._pages += news.pages

    def catch_up(self) -> None:
        """Go on with what was left over, and hear what other instances did."""
        with contained("build_connector_meta"):
            self.poll_shared()
        results, self._unbooked = self._unbooked, []
        for result in results:
            with contained("build_connector_meta"):
                self._manager.commit(result)
        deadline = self._clock() + _ADOPTION_SECONDS
        while self._pages and self._clock() < deadline:
            page = self._pages.popleft()
            with contained("build_connector_meta"):
                self._manager.adopt(page)
            if page.is_last and not page.is_borrowed:
                tier = self._manager.storage.tiers[page.tier]
                logger.info("%s is open: %d objects from before", tier.tier, len(tier))

    def poll_shared(self) -> None:
        """Hear what is new of a shared tier, and ask what lookups want to know."""
        if self._shared is not None:
            self._shared.poll()

    def close(self) -> None:
        """Leave the shared tier."""
        if self._shared is not None:
            self._shared.close()

    def _book(self, result: JobResult) -> None:
        try:
            job = self._manager.commit(result)
        except Exception:
            self._unbooked.append(result)  # a result that is lost leaves its job open for ever
            raise
        if job is not None and self._job_ended is not None:
            self._job_ended(job, result)

    def _report_health(self, rank: int, health: Sequence[TierHealth]) -> None:
        tiers = self._manager.storage.tiers
        before = [tier.health for tier in tiers]
        self._manager.report_health(rank, health)
        for tier, old in zip(tiers, before, strict=True):
            if tier.health is not old and TierHealth.OPENING not in (old, tier.health):
                logger.warning("%s was %s and is %s now", tier.tier, old.value, tier.health.value)
