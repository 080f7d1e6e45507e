"""`Router`: from what is known of the workers to where a request goes. No I/O, no clock."""

import copy
from collections.abc import Callable, Collection, Sequence

import msgspec

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.loads import LoadBook
from opal_connector.cluster.places import HashedPrefix, ModelPlaces
from opal_connector.cluster.policies import (
    Balanced,
    BalancedSettings,
    Candidate,
    Choice,
    CostTerms,
    Policy,
    make_policy,
)
from opal_connector.cluster.predictions import Predictions
from opal_connector.cluster.request import PrefixRequest, WorkerMatch
from opal_connector.cluster.router.affinity import AffinitySettings, SessionAffinity
from opal_connector.events.channel import InstanceDescription, SystemEvent

_NO_MATCH = WorkerMatch(0, 0)


class RouteQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as its route depends on it.

    `prefix` is None where the tokens are not known; then nothing but load counts, and
    `prompt_tokens` is an estimate. `prefixes` is what it is hashed to, where that is known already.
    `policy` overrides the router's own for this request.
    """

    request_id: str
    prompt_tokens: int
    prefix: PrefixRequest | None = None
    prefixes: tuple[HashedPrefix, ...] | None = None
    session_id: str | None = None
    policy: str | None = None


class RouteDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and everything that was weighed.

    `reason` is the policy's name, or `session`. `expected_tokens` of the prompt should be cached
    where it goes; `predicted_tokens` of them because of requests that are still under way.
    """

    worker_id: str
    reason: str
    prompt_tokens: int
    expected_tokens: int
    predicted_tokens: int = 0
    matches: dict[str, WorkerMatch] = {}
    costs: dict[str, CostTerms] = {}
    prefixes: tuple[HashedPrefix, ...] = ()


class Router:
    """Decides, and counts what it has sent.

    Mutable state: the loads, the predictions by model, the sessions, who is not believed and the
    speeds that workers reported last; the KVBM is its owner's. Used by one thread.

    Args:
        kvbm: What the workers hold; kept up to date by whoever owns it.
        policy: The name of the policy.
        affinity: How sessions stick.
        balanced: How `Balanced` weighs.
        seed: For policies that draw; None draws differently every time.

    Raises:
        ValueError: There is no policy of that name.
    """

    def __init__(
        self,
        kvbm: KVBM,
        policy: str = "Balanced",
        *,
        affinity: AffinitySettings | None = None,
        balanced: BalancedSettings | None = None,
        seed: int | None = None,
    ) -> None:
        self._kvbm = kvbm
        self._seed = seed
        self._policies: dict[str, Policy] = {"balanced": Balanced(balanced, seed)}
        self._policy(policy)
        self.policy_name = policy
        self.on_begin: Callable[[RouteQuestion, RouteDecision], None] = _nobody_listens
        self.loads = LoadBook()
        self._predictions: dict[tuple[str, int], Predictions] = {}
        self.sessions = SessionAffinity(affinity)
        self.disbelieved: set[str] = set()
        self._speeds: dict[str, tuple[SystemEvent, InstanceDescription, dict[str, float]]] = {}

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on.

        Raises:
            ValueError: There is none of that name.
        """
        self._policy(name)
        if name != self.policy_name:
            self.loads.forget_work()  # as uneven as another policy left it
        self.policy_name = name

    def believe(self, worker_id: str, *, is_believed: bool) -> None:
        """Whether what a worker is known to hold, or is about to, counts for it."""
        if is_believed:
            self.disbelieved.discard(worker_id)
        else:
            self.disbelieved.add(worker_id)

    def decide(
        self, question: RouteQuestion, workers: Collection[str], now: float
    ) -> RouteDecision | None:
        """The worker for a request among those that take requests now; None if there is none.

        Nothing is counted: `begin` does that when the request is sent.

        Raises:
            ValueError: The question names a policy that does not exist.
        """
        if not workers:
            return None
        policy = self._policy(question.policy)
        prefixes = self._hashed(question)
        matches = self._kvbm.match_hashed(prefixes)
        predicted = self._predicted_tokens(prefixes, now)
        for worker_id in self.disbelieved:
            matches.pop(worker_id, None)
            predicted.pop(worker_id, None)
        candidates = [
            self._candidate(
                worker_id, matches.get(worker_id, _NO_MATCH), predicted.get(worker_id, 0)
            )
            for worker_id in workers
        ]
        choice = policy.choose(question.prompt_tokens, candidates)
        worker_id, reason = choice.worker_id, question.policy or self.policy_name
        session_worker = self.sessions.worker(question.session_id, now)
        is_here = session_worker is not None and session_worker in workers
        if session_worker is not None and is_here and self._may_stick(session_worker, choice):
            worker_id, reason = session_worker, "session"
        expected = {found.worker_id: found.match for found in candidates}
        known = matches.get(worker_id, _NO_MATCH).total_tokens
        return RouteDecision(
            worker_id=worker_id,
            reason=reason,
            prompt_tokens=question.prompt_tokens,
            expected_tokens=expected[worker_id].total_tokens,
            predicted_tokens=expected[worker_id].total_tokens - known,
            matches=expected,
            costs=choice.costs,
            prefixes=prefixes,
        )

    def would_decide(
        self, question: RouteQuestion, workers: Collection[str], now: float
    ) -> RouteDecision | None:
        """The same as `decide`, of a request that is not there: nobody's turn changes."""
        policies = self._policies
        self._policies = copy.deepcopy(policies)
        try:
            return self.decide(question, workers, now)
        finally:
            self._policies = policies

    def begin(self, question: RouteQuestion, decision: RouteDecision, now: float) -> None:
        """The request is sent where the decision says."""
        self.loads.begin(
            question.request_id,
            decision.worker_id,
            new_tokens=max(0, question.prompt_tokens - decision.expected_tokens),
            total_tokens=question.prompt_tokens,
        )
        self.sessions.remember(question.session_id, decision.worker_id, now)
        for prefix in decision.prefixes:
            bit = prefix.places.names.bits.get(decision.worker_id, 0)
            if bit & prefix.workers:
                self._of(prefix.places).expect(question.request_id, bit, prefix.hashes)
        self.on_begin(question, decision)

    def first_token(self, request_id: str) -> None:
        """The first byte of the answer is here: the prompt is computed."""
        self.loads.first_token(request_id)

    def cached(self, question: RouteQuestion, cached_tokens: int) -> None:
        """The answer says how much of the prompt was cached; it is not over yet."""
        new_tokens = max(0, question.prompt_tokens - cached_tokens)
        self.loads.computed(question.request_id, new_tokens)

    def end(self, request_id: str, now: float, *, is_computed: bool) -> None:
        """The request is over; `is_computed` if its prompt was, whatever came of the answer."""
        self.loads.end(request_id)
        for predictions in self._predictions.values():
            predictions.end(request_id, now, is_computed=is_computed)

    def forget_worker(self, worker_id: str) -> None:
        """A worker is about to leave the KVBM: what was under way there goes, and its sessions."""
        self.loads.remove_worker(worker_id)
        self.sessions.forget_worker(worker_id)
        self.disbelieved.discard(worker_id)
        self._speeds.pop(worker_id, None)
        for places in self._kvbm.models():
            bit = places.names.bits.get(worker_id)
            if bit is not None:
                self._of(places).remove_worker(bit)

    # ---- inside ----

    def _hashed(self, question: RouteQuestion) -> tuple[HashedPrefix, ...]:
        if question.prefixes is not None:
            return question.prefixes
        return () if question.prefix is None else tuple(self._kvbm.hashed(question.prefix))

    def _policy(self, name: str | None) -> Policy:
        key = (name or self.policy_name).lower()
        policy = self._policies.get(key)
        if policy is None:
            policy = self._policies[key] = make_policy(key, self._seed)
        return policy

    def _of(self, places: ModelPlaces) -> Predictions:
        return self._predictions.setdefault((places.model, places.block_tokens), Predictions())

    def _predicted_tokens(self, prefixes: Sequence[HashedPrefix], now: float) -> dict[str, int]:
        """Per worker the tokens from the start that it is about to have."""
        tokens: dict[str, int] = {}
        for prefix in prefixes:
            places, predictions = prefix.places, self._of(prefix.places)
            predictions.expire(now)
            depths = predictions.depths(prefix.hashes, prefix.workers, places.names)
            for worker_id, blocks in depths.items():
                expected = blocks * places.block_tokens
                tokens[worker_id] = expected - expected % places.alignment_tokens(worker_id)
        return tokens

    def _candidate(self, worker_id: str, match: WorkerMatch, predicted_tokens: int) -> Candidate:
        if predicted_tokens > match.total_tokens:
            match = WorkerMatch(predicted_tokens, predicted_tokens)
        load = self.loads.load(worker_id)
        state = self._kvbm.workers.get(worker_id)
        if state is None or state.system is None:
            return Candidate(worker_id, match, load)
        return Candidate(
            worker_id,
            match,
            load,
            state.system.prefill_tokens_per_second,
            self._fetch_speeds(worker_id, state.description, state.system),
            state.system.device_usage,
        )

    def _fetch_speeds(
        self, worker_id: str, description: InstanceDescription, system: SystemEvent
    ) -> dict[str, float]:
        """The same as long as a worker says nothing new: it is asked for at every decision."""
        known = self._speeds.get(worker_id)
        if known is None or known[0] is not system or known[1] is not description:
            speeds = _fetch_speeds(description, system)
            known = self._speeds[worker_id] = (system, description, speeds)
        return known[2]

    def _may_stick(self, worker_id: str, choice: Choice) -> bool:
        settings = self.sessions.settings
        if settings.mode == "hard" or not choice.costs:
            return True
        best = choice.costs[choice.worker_id].first_token_seconds
        return choice.costs[worker_id].first_token_seconds <= settings.soft_factor * best


def _nobody_listens(_question: RouteQuestion, _decision: RouteDecision) -> None:
    """Until somebody does."""


def _fetch_speeds(description: InstanceDescription, system: SystemEvent) -> dict[str, float]:
    """Seconds per token that a worker measured for loads, by tier."""
    chunk_tokens = description.block_tokens * description.chunk_blocks
    token_bytes = system.chunk_bytes / chunk_tokens
    return {
        tier.tier: tier.load_seconds_per_byte * token_bytes
        for tier in system.tiers
        if tier.load_seconds_per_byte is not None
    }
