"""Which prefixes many requests have in common, and how little is kept to know that."""

import random

from opal_connector.cluster.kvbm import KVBM
from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.decide import RouteDecision, RouteQuestion
from opal_connector.cluster.router.hot_prefixes import HotPrefixes
from opal_connector.events.channel import InstanceDescription

BLOCK = 16
_RANDOM = random.Random(11)


def words(blocks: int) -> list[int]:
    return [_RANDOM.randrange(1 << 17) for _ in range(blocks * BLOCK)]


class Requests:
    """Sends prompts past the book, as the router does."""

    def __init__(self, hot: HotPrefixes) -> None:
        self.hot = hot
        self._kvbm = KVBM()
        description = InstanceDescription(
            instance_id="one", incarnation=1, model="model", block_tokens=BLOCK
        )
        self._kvbm.join(description)

    def see(self, token_ids: list[int], cache_salt: str | None = None) -> None:
        prefix = PrefixRequest(token_ids=token_ids, cache_salt=cache_salt)
        question = RouteQuestion(request_id="1", prompt_tokens=len(token_ids), prefix=prefix)
        decision = RouteDecision(
            worker_id="one",
            reason="test",
            prompt_tokens=len(token_ids),
            expected_tokens=0,
            prefixes=tuple(self._kvbm.hashed(prefix)),
        )
        self.hot.see(question, decision)


def test_what_saves_most_comes_first_and_nothing_comes_twice() -> None:
    """A long conversation has the system prompt in it, which need not be read again."""
    hot = HotPrefixes()
    requests = Requests(hot)
    system, other, turns, alone = words(4), words(6), words(30), words(50)
    for _ in range(3):
        requests.see([*system, *words(2)])
    requests.see([*system, *turns])
    requests.see([*system, *turns, *words(3)])
    for _ in range(2):
        requests.see([*other, *words(1)])
    requests.see(alone)
    found = [one.token_ids for one in hot.hottest(10)]
    assert found == [[*system, *turns], other]
    assert [one.token_ids for one in hot.hottest(1)] == [[*system, *turns]]


def test_prompts_of_different_tenants_have_nothing_in_common() -> None:
    """A salt keeps caches apart, so it keeps prefixes apart, and is known of each."""
    hot = HotPrefixes()
    requests = Requests(hot)
    prompt = words(4)
    requests.see(prompt, "a")
    requests.see(prompt, "b")
    assert hot.hottest(10) == []
    requests.see(prompt, "b")
    assert [(one.token_ids, one.cache_salt) for one in hot.hottest(10)] == [(prompt, "b")]


def test_only_so_much_is_kept() -> None:
    """The oldest goes, by number or by tokens; what is longer than all of it never comes."""
    few = HotPrefixes(max_prompts=3)
    small = HotPrefixes(max_tokens=10 * BLOCK)
    old = words(2)
    for hot in (few, small):
        requests = Requests(hot)
        for _ in range(2):
            requests.see(old)
        assert len(hot.hottest(9)) == 1
        for _ in range(3):
            requests.see(words(3))
        assert hot.hottest(9) == []
        assert len(hot) == 3
        requests.see(words(11))
    assert len(few) == 3
    assert len(small) == 3


def test_prompts_whose_tokens_nobody_knows_are_not_kept() -> None:
    """Nor those shorter than a block, nor with numbers that are no tokens."""
    hot = HotPrefixes()
    requests = Requests(hot)
    question = RouteQuestion(request_id="1", prompt_tokens=9)
    hot.see(
        question,
        RouteDecision(worker_id="one", reason="", prompt_tokens=9, expected_tokens=0),
    )
    requests.see([1, 2, 3])
    requests.see([1 << 40] * BLOCK)
    assert len(hot) == 0
