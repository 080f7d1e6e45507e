"""A `Router` that is one of several processes: what one sends, the others count as well."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from opal_connector.cluster.places import HashedPrefix
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion, Router
from opal_connector.cluster.router.peer_messages import (
    Began,
    ChainSent,
    Computed,
    Ended,
    Measured,
    Message,
)

_HASH_BYTES: Final = 32
_ALL_WORKERS: Final = -1
_ANY_TEXT: Final = "surrogatepass"  # what is no UTF-8 comes as surrogates


class SharedRouter(Router):
    """Counts what other processes of the same router have sent as if it had sent it itself.

    So loads, predictions and sessions are those of all of them. Mutable state: beside a router's,
    the requests under way here, and by process those elsewhere; used by one thread.

    Args:
        arguments: Those of `Router`.
        options: Likewise.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.tell: Callable[[Message], None] = _nobody_is_told
        self.elsewhere: Counter[str] = Counter()  # requests of other processes, by worker
        self._own: dict[str, Began] = {}
        self._own_computed: set[str] = set()
        self._foreign: dict[int, dict[str, str]] = {}  # by process and request, its worker

    def begin(self, question: RouteQuestion, decision: RouteDecision, now: float) -> None:
        """The request is sent where the decision says."""
        super().begin(question, decision, now)
        began = _began(question, decision)
        self._own[question.request_id] = began
        self._own_computed.discard(question.request_id)
        self.tell(began)

    def first_token(self, request_id: str) -> None:
        """The first byte of the answer is here: the prompt is computed."""
        super().first_token(request_id)
        if request_id in self._own and request_id not in self._own_computed:
            self._own_computed.add(request_id)
            self.tell(Computed(request_id))

    def cached(self, question: RouteQuestion, cached_tokens: int) -> None:
        """The answer says how much of the prompt was cached; it is not over yet."""
        super().cached(question, cached_tokens)
        began = self._own.get(question.request_id)
        if began is not None:
            new_tokens = max(0, question.prompt_tokens - cached_tokens)
            self._own[question.request_id] = msgspec.structs.replace(began, new_tokens=new_tokens)
            self.tell(Measured(question.request_id, new_tokens))

    def end(self, request_id: str, now: float, *, is_computed: bool) -> None:
        """The request is over; `is_computed` if its prompt was, whatever came of the answer."""
        super().end(request_id, now, is_computed=is_computed)
        if self._own.pop(request_id, None) is not None:
            self._own_computed.discard(request_id)
            self.tell(Ended(request_id, is_computed))

    # ---- the others ----

    def under_way(self) -> Iterator[Message]:
        """What another process must be told that heard nothing so far."""
        for request_id, began in self._own.items():
            yield began
            if request_id in self._own_computed:
                yield Computed(request_id)

    def hear(self, peer: int, message: Began | Computed | Measured | Ended, now: float) -> None:
        """Another process has sent something, or an answer came there."""
        requests = self._foreign.setdefault(peer, {})
        request_id = f"{peer}/{message.request_id}"
        match message:
            case Began():
                self._forget(requests, request_id)
                requests[request_id] = message.worker_id
                self.elsewhere[message.worker_id] += 1
                super().begin(*self._as_decided(request_id, message), now)
            case Computed():
                super().first_token(request_id)
            case Measured():
                self.loads.computed(request_id, message.new_tokens)
            case Ended():
                self._forget(requests, request_id)
                super().end(request_id, now, is_computed=message.is_computed)

    def lose(self, peer: int, now: float) -> None:
        """Another process is gone; what it had sent is not waited for."""
        requests = self._foreign.pop(peer, {})
        for request_id in list(requests):
            self._forget(requests, request_id)
            super().end(request_id, now, is_computed=False)

    def _forget(self, requests: dict[str, str], request_id: str) -> None:
        worker_id = requests.pop(request_id, None)
        if worker_id is not None:
            self.elsewhere[worker_id] -= 1
            if not self.elsewhere[worker_id]:
                del self.elsewhere[worker_id]

    def _as_decided(self, request_id: str, began: Began) -> tuple[RouteQuestion, RouteDecision]:
        known = {(places.model, places.block_tokens): places for places in self._kvbm.models()}
        prefixes = []
        for chain in began.chains:
            places = known.get((chain.model, chain.block_tokens))
            if places is not None:
                prefixes.append(HashedPrefix(places, _split(chain.hashes), _ALL_WORKERS))
        question = RouteQuestion(
            request_id=request_id,
            prompt_tokens=began.total_tokens,
            session_id=None if began.session is None else began.session.decode(errors=_ANY_TEXT),
        )
        decision = RouteDecision(
            worker_id=began.worker_id,
            reason="",
            prompt_tokens=began.total_tokens,
            expected_tokens=began.total_tokens - began.new_tokens,
            prefixes=tuple(prefixes),
        )
        return question, decision


def _began(question: RouteQuestion, decision: RouteDecision) -> Began:
    chains = tuple(
        ChainSent(prefix.places.model, prefix.places.block_tokens, b"".join(prefix.hashes))
        for prefix in decision.prefixes
        if prefix.places.names.bits.get(decision.worker_id, 0) & prefix.workers
    )
    session = question.session_id
    return Began(
        question.request_id,
        decision.worker_id,
        max(0, question.prompt_tokens - decision.expected_tokens),
        question.prompt_tokens,
        None if session is None else session.encode(errors=_ANY_TEXT),
        chains,
    )


def _split(run: bytes) -> list[bytes]:
    return [run[start : start + _HASH_BYTES] for start in range(0, len(run), _HASH_BYTES)]


def _nobody_is_told(_: Message) -> None:
    """Until there are others."""
