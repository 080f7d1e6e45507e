"""`Balanced`: the worker where the next token comes soonest, and the load stays even."""

import math
import random
import statistics
from collections.abc import Sequence

import msgspec

from opal_connector.cluster.policies.base import Candidate, Choice, CostTerms

_ALIKE = math.log(2.0)  # up to twice as fast or slow is the same
_TRUSTED_TOKENS = 4_096.0  # computed lately: half of the trust in a worker's own measure
_IDLE_SECONDS = 1.0  # of recent work: below that nobody is busy, and nothing uneven


class BalancedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How `Balanced` weighs.

    `work_weight` is what a second of computing or fetching counts against a second of waiting: work
    that another worker need not have done takes room in its cache and delays whoever comes next.
    `evenness` is how much of a prompt's whole prefill it costs a worker to have been given, lately,
    as much more than the least busy one as all have on average. From `work_weight` on, a worker
    that was given nothing gets the next prompt whoever has its prefix; below, one that lacks a
    prefix that all others have may get nothing for good. `decode_weight` is what a token that is
    being decoded on costs, in tokens to compute. Above `full_device` the device is about to
    preempt, and whatever is there must be computed again. With `temperature` above 0 the choice is
    random, the likelier the smaller the cost; it is in shares of the mean cost.
    `assumed_tokens_per_second` counts until any worker has measured its prefill.
    """

    work_weight: float = 8.0
    evenness: float = 8.0
    decode_weight: float = 0.02
    full_device: float = 0.98
    temperature: float = 0.0
    assumed_tokens_per_second: float = 2_000.0


class Balanced:
    """Adds up seconds: the queue, the cheaper of fetching and computing, decoding, evenness.

    Mutable state: the generator that decides between equals.
    """

    def __init__(self, settings: BalancedSettings | None = None, seed: int | None = None) -> None:
        self._settings = settings or BalancedSettings()
        self._random = random.Random(seed)

    def choose(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> Choice:
        """The cheapest worker."""
        costs = self.costs(prompt_tokens, candidates)
        weight = self._settings.work_weight
        totals = {worker_id: terms.weighted_seconds(weight) for worker_id, terms in costs.items()}
        if self._settings.temperature > 0:
            return Choice(self._drawn(totals), costs)
        cheapest = min(totals.values())
        limit = cheapest * (1 + 1e-9) + 1e-12  # equal but for rounding
        best = [worker_id for worker_id, total in totals.items() if total <= limit]
        return Choice(self._random.choice(best), costs)

    def costs(self, prompt_tokens: int, candidates: Sequence[Candidate]) -> dict[str, CostTerms]:
        """The cost of a prompt at every worker."""
        rates = _rates(candidates, self._settings.assumed_tokens_per_second)
        recent = {
            found.worker_id: found.load.recent_tokens / rates[found.worker_id]
            for found in candidates
        }
        least, mean = min(recent.values()), statistics.fmean(recent.values())
        costs: dict[str, CostTerms] = {}
        for candidate in candidates:
            worker_id = candidate.worker_id
            rate = rates[worker_id]
            ahead = (recent[worker_id] - least) / max(mean, _IDLE_SECONDS)
            costs[worker_id] = self._terms(prompt_tokens, candidate, rate, ahead)
        return costs

    def _terms(
        self, prompt_tokens: int, candidate: Candidate, rate: float, ahead: float
    ) -> CostTerms:
        settings = self._settings
        load, match = candidate.load, candidate.match
        fetch_seconds = 0.0
        # Of a whole match the last token is computed all the same.
        computed = max(prompt_tokens - match.total_tokens, 1)
        for tier, tokens in match.tier_tokens.items():
            fetch = candidate.fetch_seconds_per_token.get(tier, 0.0) * tokens
            if fetch <= tokens / rate:
                fetch_seconds += fetch
            else:
                computed += tokens
        decoding = load.decoding_tokens * settings.decode_weight
        if candidate.device_usage >= settings.full_device:
            decoding += load.decoding_tokens
        return CostTerms(
            queue_seconds=load.queued_tokens / rate,
            fetch_seconds=fetch_seconds,
            compute_seconds=computed / rate,
            decode_seconds=decoding / rate,
            evenness_seconds=settings.evenness * ahead * prompt_tokens / rate,
        )

    def _drawn(self, totals: dict[str, float]) -> str:
        scale = self._settings.temperature * (statistics.fmean(totals.values()) or 1.0)
        cheapest = min(totals.values())
        weights = [math.exp((cheapest - total) / scale) for total in totals.values()]
        return self._random.choices(list(totals), weights)[0]


def _rates(candidates: Sequence[Candidate], assumed: float) -> dict[str, float]:
    """Prefill tokens per second, as far as workers' own measures can tell them apart.

    A worker measures itself the faster the more it has to do at once, so what is given more work
    looks better, and what is given none never measures again. Therefore a difference counts only as
    far as it goes beyond `_ALIKE`, and only so far as the worker had work lately that it could be
    measured by. Who has not measured any is taken for an average one.
    """
    measured = {
        found.worker_id: (math.log(found.prefill_tokens_per_second), found.load.recent_tokens)
        for found in candidates
        if found.prefill_tokens_per_second
    }
    if not measured:
        return dict.fromkeys((found.worker_id for found in candidates), assumed)
    weights = sum(1.0 + recent for _, recent in measured.values())
    mean = sum(rate * (1.0 + recent) for rate, recent in measured.values()) / weights
    rates = dict.fromkeys((found.worker_id for found in candidates), math.exp(mean))
    for worker_id, (rate, recent) in measured.items():
        beyond = abs(rate - mean) - _ALIKE
        if beyond > 0:
            trusted = beyond * recent / (recent + _TRUSTED_TOKENS)
            rates[worker_id] = math.exp(mean + math.copysign(trusted, rate - mean))
    return rates
