"""What a router has under way at each worker, counted by itself: exact, and known at once."""

import math

import msgspec

WORK_MEMORY_REQUESTS = 256


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """What is under way at one worker.

    `queued_tokens` are prompt tokens that are still to be computed, `decoding_tokens` those of the
    requests that are past that. `recent_tokens` were given to it to compute lately, older ones
    counting less: what answers said was computed, where they did, else what was expected.
    """

    requests: int = 0
    queued_tokens: int = 0
    decoding_tokens: int = 0
    recent_tokens: float = 0.0


class _UnderWay(msgspec.Struct):
    worker_id: str
    new_tokens: int
    total_tokens: int
    is_decoding: bool = False


class _Sums(msgspec.Struct):
    requests: int = 0
    queued_tokens: int = 0
    decoding_tokens: int = 0
    recent_tokens: float = 0.0
    recent_at: int = 0


class LoadBook:
    """Requests from when they are sent until they end, and their sums by worker.

    Mutable state: the requests under way, the sums and how many requests have begun; used by one
    thread. After `memory_requests` more of them, at whichever worker, work of the past has lost two
    thirds of its weight. Requests and not seconds, because a second is a hundred prompts to one
    cluster and a tenth of a prompt to another, and evenness needs many prompts to be seen at all.
    """

    def __init__(self, memory_requests: int = WORK_MEMORY_REQUESTS) -> None:
        self._memory_requests = memory_requests
        self._begun = 0
        self._under_way: dict[str, _UnderWay] = {}
        self._sums: dict[str, _Sums] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, request_id: str, worker_id: str, *, new_tokens: int, total_tokens: int) -> None:
        """A request is sent to a worker, which has `new_tokens` of it to compute."""
        self.end(request_id)
        self._begun += 1
        self._under_way[request_id] = _UnderWay(worker_id, new_tokens, total_tokens)
        sums = self._sums.setdefault(worker_id, _Sums())
        sums.requests += 1
        sums.queued_tokens += new_tokens
        self._add_recent(sums, new_tokens)

    def first_token(self, request_id: str) -> None:
        """A request's prompt is computed. Said again, or after its end, it means nothing."""
        request = self._under_way.get(request_id)
        if request is None or request.is_decoding:
            return
        request.is_decoding = True
        sums = self._sums[request.worker_id]
        sums.queued_tokens -= request.new_tokens
        sums.decoding_tokens += request.total_tokens

    def computed(self, request_id: str, new_tokens: int) -> None:
        """A request under way took `new_tokens` of computing, whatever was expected.

        A worker whose cache thrashes computes more than its contents promised, and looks idle by
        what was expected of it.
        """
        request = self._under_way.get(request_id)
        if request is None:
            return
        sums = self._sums[request.worker_id]
        difference = new_tokens - request.new_tokens
        self._add_recent(sums, difference)
        if not request.is_decoding:
            sums.queued_tokens += difference
        request.new_tokens = new_tokens

    def end(self, request_id: str) -> None:
        """A request is over, however it ended."""
        request = self._under_way.pop(request_id, None)
        sums = self._sums.get(request.worker_id) if request is not None else None
        if request is None or sums is None:
            return
        sums.requests -= 1
        if request.is_decoding:
            sums.decoding_tokens -= request.total_tokens
        else:
            sums.queued_tokens -= request.new_tokens

    def welcome(self, worker_id: str) -> None:
        """A worker takes part from now on, or again: it counts as one that had an average share.

        Else everything new would go there until it had made up for what others did without it.
        """
        others = [self._recent(sums) for name, sums in self._sums.items() if name != worker_id]
        sums = self._sums.setdefault(worker_id, _Sums())
        sums.recent_tokens = math.fsum(others) / len(others) if others else 0.0
        sums.recent_at = self._begun

    def forget_work(self) -> None:
        """Nobody is ahead of anybody: what was computed so far is nobody's to make up for."""
        for sums in self._sums.values():
            sums.recent_tokens = 0.0

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, and what was under way there with it."""
        self._sums.pop(worker_id, None)
        gone = [name for name, request in self._under_way.items() if request.worker_id == worker_id]
        for name in gone:
            del self._under_way[name]

    def load(self, worker_id: str) -> WorkerLoad:
        """What is under way at a worker."""
        sums = self._sums.get(worker_id)
        if sums is None:
            return WorkerLoad()
        return WorkerLoad(
            sums.requests, sums.queued_tokens, sums.decoding_tokens, self._recent(sums)
        )

    def _recent(self, sums: _Sums) -> float:
        age_requests = self._begun - sums.recent_at
        return sums.recent_tokens * math.exp(-age_requests / self._memory_requests)

    def _add_recent(self, sums: _Sums, tokens: int) -> None:
        sums.recent_tokens = max(0.0, self._recent(sums) + tokens)
        sums.recent_at = self._begun
