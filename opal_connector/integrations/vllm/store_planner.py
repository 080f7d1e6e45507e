"""Plans what the requests of a step may store, and holds the device blocks that stores read."""

from collections.abc import Callable, Mapping, Sequence

from vllm.v1.core.sched.output import SchedulerOutput

from opal_connector.integrations.vllm.block_holds import BlockHolds
from opal_connector.integrations.vllm.books import Books, block_tables
from opal_connector.integrations.vllm.guard import contained
from opal_connector.integrations.vllm.tracker import RequestTracker
from opal_connector.managers import OpalRequest, Refusal, StateBlock
from opal_connector.managers.planning import IN_FLIGHT
from opal_connector.transfers import StoreJob

_SOON_OTHERWISE = frozenset({IN_FLIGHT, Refusal.LEAVING.value})


class StorePlanner:
    """From completed chunks to store jobs.

    Mutable state: the jobs not yet sent, and in every tracker how far its request was planned;
    used by the engine core's thread only.
    """

    def __init__(
        self,
        books: Books,
        holds: BlockHolds,
        identified: Callable[[RequestTracker], OpalRequest | None],
        *,
        ranks: int,
    ) -> None:
        self._books = books
        self._holds = holds
        self._identified = identified
        self._ranks = ranks
        self._block_tokens = books.manager.database.block_tokens
        # Where a chunk of some group may be complete. What has a window must be stored in the step
        # that computes it: in the next one its first blocks may be gone.
        self._chunk_tokens = min(
            manager.chunk_blocks * manager.attention.block_tokens
            for manager in books.manager.coordinator.managers
        )
        self._jobs: list[StoreJob] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self) -> tuple[StoreJob, ...]:
        """The jobs planned since the last call."""
        jobs, self._jobs = self._jobs, []
        return tuple(jobs)

    def plan_step(
        self, output: SchedulerOutput, trackers: Mapping[str, RequestTracker], now: float
    ) -> None:
        """Look at every request of the step; most have completed no chunk."""
        chunk_tokens = self._chunk_tokens
        handed = _handed_states(output)
        for request_id, scheduled_tokens in output.num_scheduled_tokens.items():
            tracker = trackers.get(request_id)
            if tracker is None:
                continue
            opal = tracker.opal or self._identified(tracker)
            if opal is None:
                continue
            request = tracker.request
            # Drafted tokens may be rejected: nothing beyond the request's own tokens is sure.
            sure_tokens = request.num_computed_tokens + scheduled_tokens
            if sure_tokens > request.num_tokens:
                sure_tokens = request.num_tokens
            tracker.sure_tokens = sure_tokens
            ends_prompt = not tracker.has_planned_tail and sure_tokens >= request.num_prompt_tokens
            states = handed.get(request_id, ())
            is_due = sure_tokens // chunk_tokens > tracker.planned_chunks or ends_prompt
            if not (is_due or states):
                continue
            tracker.planned_chunks = sure_tokens // chunk_tokens
            tracker.has_planned_tail = tracker.has_planned_tail or ends_prompt
            state = output.kv_connector_block_state
            tables = state.get_block_ids(request_id) if state is not None else None
            if tables is None:
                continue
            with contained("build_connector_meta"):
                self.plan(tracker, tables, now, include_tail=ends_prompt, states=states)
            if opal.drop_reason in _SOON_OTHERWISE:
                # What is being stored or deleted is done within a few steps: try again then.
                tracker.planned_chunks = -1
                tracker.has_planned_tail = tracker.has_planned_tail and not ends_prompt

    def plan(
        self,
        tracker: RequestTracker,
        block_ids: tuple[Sequence[int], ...],
        now: float,
        *,
        include_tail: bool,
        states: Sequence[StateBlock] = (),
    ) -> None:
        """Plan a store of what is surely computed of one request, and hold its blocks."""
        assert tracker.opal is not None
        tokens = tracker.request.all_token_ids
        tracker.opal.extend(tokens)
        job = self._books.manager.plan_store(
            tracker.opal,
            full_blocks=tracker.sure_tokens // self._block_tokens,
            tables=block_tables(block_ids, self._books),
            include_tail=include_tail,
            tokens=tokens,
            states=states,
            max_blocks=self._holds.spare_blocks,
        )
        if job is None:
            return
        held = [block_id for item in job.objects for block_id in item.block_ids]
        self._holds.hold(job.job_id, held, ranks=self._ranks, now=now)
        self._jobs.append(job)


def _handed_states(output: SchedulerOutput) -> dict[str, list[StateBlock]]:
    """The states that vLLM hands over in this step, by request: a table does not tell them."""
    state = output.kv_connector_block_state
    offers = state.boundary_state_offloads if state is not None else {}
    return {
        request_id: [StateBlock(*entry) for entry in entries]
        for request_id, entries in offers.items()
    }
