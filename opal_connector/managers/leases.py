"""What a lookup promises, until the load, the end of the request or a deadline."""

from collections.abc import Sequence

from opal_connector.managers.asking import Asking
from opal_connector.managers.coordinator import OpalKVCacheCoordinator
from opal_connector.managers.request import Lease, OpalRequest
from opal_connector.managers.segments import Segment
from opal_connector.managers.storage_manager import OpalStorageManager

LEASE_SECONDS = 60.0
WAIT_SECONDS = 1.0  # how long a lookup may answer "ask again" for what another one moves


class Leases:
    """The promises of all requests.

    Mutable state: `_leased`, the requests that hold one, by identity (an id may come again);
    guarded by the lock of `OpalKVCacheManager`.
    """

    def __init__(
        self,
        storage: OpalStorageManager,
        coordinator: OpalKVCacheCoordinator,
        asking: Asking | None = None,
    ) -> None:
        self._storage = storage
        self._coordinator = coordinator
        self._asking = asking
        self._leased: dict[int, OpalRequest] = {}

    def __len__(self) -> int:
        return len(self._leased)

    def segments(self) -> list[Segment]:
        """Everything that is promised."""
        return [
            segment
            for request in self._leased.values()
            for segment in (request.lease.segments if request.lease is not None else ())
        ]

    def answer(self, request: OpalRequest, asked: tuple[int, int, int], now: float) -> Lease | None:
        """The lease that answers `asked`; None to wait for what another request moves.

        A lease on the same question is continued from its end: what it holds cannot have left.
        """
        lease = request.lease
        if lease is None or lease.asked != asked:
            lease = self._walk(request, asked, now)
        if lease is not None:
            lease.deadline = now + LEASE_SECONDS
        return lease

    def release(self, request: OpalRequest) -> None:
        """End a promise, if there is one."""
        lease, request.lease = request.lease, None
        if lease is None:
            return
        del self._leased[id(request)]
        for segment in lease.segments:
            self._storage.tiers[segment.tier].unpin(segment.record)

    def release_all(self) -> None:
        """End all promises."""
        for request in list(self._leased.values()):
            self.release(request)

    def expire(self, now: float) -> int:
        """End promises past their deadline; returns how many there were."""
        late = [
            request
            for request in self._leased.values()
            if request.lease is not None and request.lease.deadline < now
        ]
        for request in late:
            self.release(request)
        return len(late)

    def _walk(self, request: OpalRequest, asked: tuple[int, int, int], now: float) -> Lease | None:
        _, computed_blocks, max_blocks = asked
        old = request.lease
        kept: Sequence[Segment] = ()
        kept_blocks = 0
        if self._coordinator.extends_hits and old is not None and old.still_answers(asked):
            kept, kept_blocks = old.segments, old.block_count
        first_block = computed_blocks + kept_blocks
        plan = self._coordinator.find_hit(
            request.chain, computed_blocks=first_block, max_blocks=max_blocks
        )
        request.junction_blocks = max(request.junction_blocks, plan.junction_blocks)
        stop_block = first_block + plan.block_count
        may_grow = plan.is_waiting
        if self._storage.is_opening and stop_block < max_blocks:
            may_grow = True  # a tier that does not know yet what it has may have the rest
        if may_grow and self._may_wait(request, now):
            self.release(request)
            return None
        if self._is_asked(request, stop_block, max_blocks, now):
            self.release(request)
            return None
        for segment in (*kept, *plan.segments):
            self._storage.tiers[segment.tier].pin(segment.record)
        self.release(request)
        request.lease = Lease(
            asked=asked,
            computed_blocks=computed_blocks,
            segments=(*kept, *plan.segments),
            block_count=kept_blocks + plan.block_count,
        )
        self._leased[id(request)] = request
        return request.lease

    def _is_asked(self, request: OpalRequest, stop_block: int, max_blocks: int, now: float) -> bool:
        """Whether a shared tier is being asked for what is missing."""
        if self._asking is None or stop_block >= max_blocks:
            return False
        if not self._storage.tiers[self._asking.tier].is_readable:
            return False
        return self._asking.is_pending(
            request, stop_block=stop_block, max_blocks=max_blocks, now=now
        )

    def _may_wait(self, request: OpalRequest, now: float) -> bool:
        if request.waiting_since is None:
            request.waiting_since = now
        return now - request.waiting_since < WAIT_SECONDS
