"""The router's decisions against what real engines then had in their caches."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from router_engines import ADAPTER, PATIENT, RouterEngine
from router_thread import RunningRouter, running_router

from opal_connector.cluster.request import PrefixRequest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32


class Asked:
    """An answer: who gave it, what was expected of it, what it had."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        self.body: dict[str, Any] = answer.json()
        self.worker = answer.headers["X-Opal-Worker"]
        self.expected_tokens = int(answer.headers.get("X-Opal-Expected-Tokens", -1))
        usage = self.body["usage"]
        self.prompt_tokens: int = usage["prompt_tokens"]
        self.cached_tokens: int = usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def hit_tokens(self) -> dict[str, int]:
        """By tier below the device."""
        found: dict[str, int] = self.body["kv_transfer_params"]["opal"]["hit_tokens"]
        return found


class Client:
    """Asks a router as a client does."""

    def __init__(self, router: RunningRouter) -> None:
        self.router = router
        self.http = httpx.Client(base_url=router.url, timeout=60, trust_env=False)

    def ask(self, tokens: list[int], **more: Any) -> Asked:
        body = {"model": "model", "prompt": tokens, "max_tokens": 2, "temperature": 0, **more}
        return Asked(self.http.post("/v1/completions", json=body))

    def knows(self, worker: str, tokens: list[int], **identity: str) -> None:
        """Until the index has all whole blocks of a prompt at a worker."""
        request = PrefixRequest(token_ids=tokens, **identity)  # type: ignore[arg-type]
        wanted = len(tokens) // BLOCK * BLOCK

        def is_known(core: Any) -> bool:
            match = core.index.match(request).get(worker)
            return match is not None and match.total_tokens == wanted

        self.router.until(is_known, f"{wanted} tokens at {worker}")


def fresh_prompt(seed: int, blocks: int = 12) -> list[int]:
    """Whole blocks and a token that no other test has."""
    generator = random.Random(f"matrix {seed}")
    return [generator.randrange(256) for _ in range(blocks * BLOCK + 1)]


@pytest.fixture(scope="module")
def router(engines: dict[str, RouterEngine]) -> Iterator[RunningRouter]:
    """In front of all three, the one without Opal found by asking it."""
    given = {
        **PATIENT,
        "instances": [engine.config for engine in engines.values()],
        "affinity": {"mode": "off"},
        "tokens": {"timeout_seconds": 20.0},
    }
    with running_router(given) as running:
        running.until(lambda core: len(core.sources.feed.statuses()) == 3, "the discovery")
        running.settled()
        yield running


@pytest.fixture
def client(router: RunningRouter) -> Iterator[Client]:
    made = Client(router)
    yield made
    made.http.close()
    router.idle()


def test_after_a_reset_of_the_device_its_host_memory_still_counts_and_still_hits(
    engines: dict[str, RouterEngine], client: Client
) -> None:
    """`AllBlocksCleared` names no tier: what lies below the device is not forgotten."""
    prompt = fresh_prompt(1)
    cold = client.ask(prompt)
    while cold.worker == "plain":  # it has no tiers
        prompt = fresh_prompt(random.Random(repr(prompt)).randrange(1 << 30))
        cold = client.ask(prompt)
    assert cold.cached_tokens == 0
    client.knows(cold.worker, prompt)
    engines[cold.worker].server.reset_device()

    def is_cleared(core: Any) -> bool:
        match = core.index.match(PrefixRequest(token_ids=prompt))[cold.worker]
        return bool(match.device_tokens == 0 and match.tier_tokens == {"CPUMemory": 12 * BLOCK})

    client.router.until(is_cleared, "the reset")
    warm = client.ask(prompt)
    assert warm.worker == cold.worker
    assert warm.expected_tokens == warm.cached_tokens == 12 * BLOCK
    assert warm.hit_tokens == {"CPUMemory": 12 * BLOCK}
    assert warm.body["choices"][0]["text"] == cold.body["choices"][0]["text"]


def test_adapters_and_salts_never_share_what_an_engine_has(client: Client) -> None:
    prompt = fresh_prompt(2)
    identities: list[dict[str, str]] = [
        {},
        {"cache_salt": "one tenant"},
        {"cache_salt": "another tenant"},
        {"model": ADAPTER},
        {"model": ADAPTER, "cache_salt": "one tenant"},
    ]
    colds = []
    for identity in identities:
        cold = client.ask(prompt, **identity)
        assert (cold.expected_tokens, cold.cached_tokens) == (0, 0)
        named = {"lora_name": identity["model"]} if "model" in identity else {}
        client.knows(cold.worker, prompt, **named, **_salt(identity))
        colds.append(cold)
    for identity, cold in zip(identities, colds, strict=True):
        warm = client.ask(prompt, **identity)
        assert warm.worker == cold.worker
        assert warm.expected_tokens == warm.cached_tokens == 12 * BLOCK
        assert warm.body["choices"][0]["text"] == cold.body["choices"][0]["text"]
    texts = [cold.body["choices"][0]["text"] for cold in colds]
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4]


def _salt(identity: dict[str, str]) -> dict[str, str]:
    return {"cache_salt": identity["cache_salt"]} if "cache_salt" in identity else {}


def test_eight_equal_cold_prompts_at_once_are_one_prefill(client: Client) -> None:
    """However they come together, no second engine computes what the first is computing."""
    for seed in (30, 31, 32):
        prompt = fresh_prompt(seed, blocks=40)
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda _, asked=prompt: client.ask(asked), range(8)))  # type: ignore[misc]
        assert len({answer.worker for answer in answers}) == 1
        computed = [answer.prompt_tokens - answer.cached_tokens for answer in answers]
        assert sorted(computed) == [*[1] * 7, len(prompt)]


def test_an_engine_without_opal_is_found_by_asking_it_and_routed_by_its_device(
    engines: dict[str, RouterEngine], client: Client
) -> None:
    """Its own events tell what it has: what nobody sent through the router counts as well."""
    prompts = [fresh_prompt(seed) for seed in range(40, 45)]
    unasked = fresh_prompt(45)
    for prompt in (*prompts, unasked):
        engines["plain"].server.complete(prompt, max_tokens=2)
        client.knows("plain", prompt)
    for prompt in prompts:
        warm = client.ask(prompt)
        assert warm.worker == "plain"
        assert warm.expected_tokens == warm.cached_tokens == 12 * BLOCK
    engines["plain"].server.reset_device()
    engines["plain"].server.complete(fresh_prompt(46))  # an idle engine says nothing of its reset

    def is_forgotten(core: Any) -> bool:
        return "plain" not in core.index.match(PrefixRequest(token_ids=unasked))

    client.router.until(is_forgotten, "the reset")
    assert client.ask(unasked).expected_tokens == 0


def test_what_was_expected_of_all_these_requests_was_there(
    engines: dict[str, RouterEngine], client: Client
) -> None:
    """After a mix of prompts that share beginnings, no engine has disappointed the router."""
    generator = random.Random(7)
    heads = [fresh_prompt(seed, blocks=6)[:-1] for seed in range(50, 53)]
    for _ in range(40):
        tail = [generator.randrange(256) for _ in range(generator.randrange(1, 100))]
        client.ask([*generator.choice(heads), *tail])
    audits = client.router.look(
        lambda core: {name: (one.trust, one.resyncs) for name, one in core.audit.workers.items()}
    )
    assert 2 <= len(audits.keys() & engines.keys()) == len(audits)
    assert all(trust > 0.99 and not resyncs for trust, resyncs in audits.values()), audits
    text = client.http.get("/metrics").text
    assert all(f'opal_router_audit_requests_total{{worker="{name}"}}' in text for name in audits)
