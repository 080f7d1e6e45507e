"""`Balanced` over many requests: the prefix is kept to few workers, the work is shared by all."""

import random
from collections.abc import Iterable

import pytest

from opal_connector.cluster.loads import LoadBook, WorkerLoad
from opal_connector.cluster.policies import Balanced, Candidate
from opal_connector.cluster.request import WorkerMatch

RATE = 1_000.0


class Cluster:
    """Workers that keep everything: which prefixes they have, and what they computed.

    `overruns` are what a worker computes in multiples of what was expected of it.
    """

    def __init__(self, workers: int, seed: int, overruns: dict[str, int] | None = None) -> None:
        self.computed = {f"w{number}": 0 for number in range(workers)}
        self.loads = LoadBook()
        self._policy = Balanced(seed=seed)
        self._prefixes: dict[str, dict[str, int]] = {name: {} for name in self.computed}
        self._overruns = overruns or {}
        self._requests = 0

    def serve(self, prefix: str, prefix_tokens: int, prompt_tokens: int) -> str:
        """One request from its choice to its end; its prefix is kept with what it grew to."""
        hits = {
            name: min(found.get(prefix, 0), prefix_tokens) for name, found in self._prefixes.items()
        }
        candidates = [
            Candidate(name, WorkerMatch(hit, hit), self.loads.load(name), RATE)
            for name, hit in hits.items()
        ]
        chosen = self._policy.choose(prompt_tokens, candidates).worker_id
        self._requests += 1
        request_id = str(self._requests)
        expected = prompt_tokens - hits[chosen]
        computed = expected * self._overruns.get(chosen, 1)
        self.loads.begin(request_id, chosen, new_tokens=expected, total_tokens=prompt_tokens)
        self.loads.computed(request_id, computed)
        self.loads.end(request_id)
        self.computed[chosen] += computed
        found = self._prefixes[chosen]
        found[prefix] = max(found.get(prefix, 0), prompt_tokens)
        return chosen

    @property
    def imbalance(self) -> float:
        return max(self.computed.values()) * len(self.computed) / sum(self.computed.values())


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_one_prefix_that_everybody_has_is_computed_once_a_worker_and_all_share_the_rest(
    workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    cluster, own_tokens = Cluster(workers, seed), 0
    for _ in range(600):
        tokens = rng.randint(100, 900)
        own_tokens += tokens
        cluster.serve("hot", 4_000, 4_000 + tokens)
    assert sum(cluster.computed.values()) <= own_tokens + workers * 4_000
    assert cluster.imbalance < 1.1


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_far_longer_than_all_others_is_made_up_for(seed: int) -> None:
    """Whoever got it is given less until the others have done as much."""
    cluster = Cluster(4, seed)
    giant = cluster.serve("giant", 0, 60_000)
    after = [cluster.serve(str(number), 0, 1_000) for number in range(100)]
    assert after.count(giant) == 0
    for number in range(500):
        cluster.serve(f"later {number}", 0, 1_000)
    assert cluster.imbalance < 1.1


@pytest.mark.parametrize("seed", range(5))
def test_conversations_stay_where_their_documents_are_and_the_work_is_even(seed: int) -> None:
    rng = random.Random(seed)
    cluster, needed = Cluster(2, seed), 0
    lengths = dict.fromkeys(range(24), 5_000)
    for user in [*lengths, *rng.choices(list(lengths), k=200)]:
        is_first = lengths[user] == 5_000
        lengths[user] += 250
        needed += 5_250 if is_first else 250
        cluster.serve(str(user), lengths[user] - 250, lengths[user])
    assert sum(cluster.computed.values()) <= 1.15 * needed
    assert cluster.imbalance < 1.1


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_computes_more_than_expected_is_given_less_by_as_much(seed: int) -> None:
    cluster = Cluster(4, seed, overruns={"w0": 3})
    for number in range(400):
        cluster.serve(str(number), 0, 1_000)
    assert cluster.imbalance < 1.1


def test_the_price_of_being_ahead_is_told_in_seconds() -> None:
    """Half as much again as the mean more than the least: eight times that of a whole prefill."""
    recent: Iterable[tuple[str, float]] = (("ahead", 5_000.0), ("behind", 3_000.0))
    candidates = [
        Candidate(name, load=WorkerLoad(recent_tokens=tokens), prefill_tokens_per_second=RATE)
        for name, tokens in recent
    ]
    costs = Balanced().costs(2_000, candidates)
    assert costs["ahead"].evenness_seconds == pytest.approx(8 * 0.5 * 2.0)
    assert costs["behind"].evenness_seconds == 0.0
