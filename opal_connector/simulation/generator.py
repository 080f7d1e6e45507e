"""Traces that are made up: chats in turns, for tests and benchmarks without a recorded one."""

import random

from opal_connector.simulation.trace import Trace, TraceRequest, chain_hashes

_BLOCKS_MOST = 200  # a chat that is longer ends


def generated_chats(
    seed: int,
    request_count: int,
    *,
    turn_chance: float,
    chats_kept: int,
    block_tokens: int = 512,
    mean_gap_seconds: float = 0.3,
) -> Trace:
    """Chats in turns behind one common block: most have one turn, a few have many.

    Args:
        seed: Equal seeds make equal traces.
        request_count: Requests of all chats together.
        turn_chance: How likely a request continues a chat instead of beginning one.
        chats_kept: A request continues one of so many that were active last.
        block_tokens: Tokens of a block.
        mean_gap_seconds: Between arrivals, exponentially distributed.
    """
    rng = random.Random(seed)
    known: dict[tuple[bytes, int], bytes] = {}
    next_id = 1
    arrival_seconds = 0.0
    chats: list[list[int]] = []
    requests = []
    for _ in range(request_count):
        if chats and rng.random() < turn_chance:
            past = chats.pop(rng.randrange(max(0, len(chats) - chats_kept), len(chats)))
        else:
            past = [0]
        count = 1 + int(rng.lognormvariate(1.5, 1.0))
        ids = [*past, *range(next_id, next_id + count)]
        next_id += count
        if len(ids) < _BLOCKS_MOST:
            chats.append(ids)
        input_tokens = len(ids) * block_tokens + rng.randrange(block_tokens)
        output_tokens = rng.randrange(1, block_tokens)
        hashes = chain_hashes(ids, known)
        requests.append(TraceRequest(arrival_seconds, input_tokens, output_tokens, hashes))
        arrival_seconds += rng.expovariate(1 / mean_gap_seconds)
    return Trace(block_tokens, requests)
