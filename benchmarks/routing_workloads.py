"""Workloads for `routing.py` that are made, not read: a trace, and the blocks of an instance."""

import random
from hashlib import sha256

from opal_connector.keys import CHAIN_ROOT
from opal_connector.simulation.trace import Trace, TraceRequest

BLOCK_TOKENS = 32
_ARRIVALS_PER_SECOND = 1.0


class _Prompt:
    """A prompt that only grows, block by block."""

    def __init__(self, hashes: list[bytes]) -> None:
        self.hashes = hashes

    def grown(self, what: str, blocks: int) -> "_Prompt":
        """The same with so many more blocks, of contents that have this name."""
        hashes = list(self.hashes)
        for number in range(blocks):
            parent_hash = hashes[-1] if hashes else CHAIN_ROOT
            hashes.append(sha256(parent_hash + f"{what}/{number}".encode()).digest())
        return _Prompt(hashes)

    def request(self, arrival_seconds: float) -> TraceRequest:
        """It arrives; a few tokens behind its last block are a block of no one."""
        input_tokens = len(self.hashes) * BLOCK_TOKENS + 1
        return TraceRequest(arrival_seconds, input_tokens, 64, self.hashes)


def conversations(seed: int, users: int = 24, turns: int = 8) -> tuple[Trace, int]:
    """Users with one system prompt, each about a document of their own, in turns of random order.

    An instance has room for two thirds of the documents: all of them with half of the users, far
    from it with everybody.
    """
    rng = random.Random(seed)
    system_blocks, document_blocks, turn_blocks = 32, 128, 8
    system = _Prompt([]).grown("system", system_blocks)
    prompts = [system.grown(f"document {user}", document_blocks) for user in range(users)]
    order = [user for user in range(users) for _ in range(turns)]
    rng.shuffle(order)
    requests: list[TraceRequest] = []
    now = 0.0
    for number, user in enumerate(order):
        now += rng.expovariate(_ARRIVALS_PER_SECOND)
        prompts[user] = prompts[user].grown(f"turn {number}", turn_blocks)
        requests.append(prompts[user].request(now))
    whole_blocks = document_blocks + turns * turn_blocks
    return Trace(BLOCK_TOKENS, requests), system_blocks + users * whole_blocks * 2 // 3


def one_hot_prefix(seed: int, requests: int = 400) -> tuple[Trace, int]:
    """All requests begin with the same long prefix; one in fifty has a long prompt behind it."""
    rng = random.Random(seed)
    prefix_blocks, short_blocks, long_blocks = 128, 16, 256
    prefix = _Prompt([]).grown("prefix", prefix_blocks)
    made: list[TraceRequest] = []
    now = 0.0
    for number in range(requests):
        now += rng.expovariate(_ARRIVALS_PER_SECOND)
        blocks = long_blocks if number % 50 == 25 else short_blocks
        made.append(prefix.grown(f"question {number}", blocks).request(now))
    return Trace(BLOCK_TOKENS, made), 1_024
