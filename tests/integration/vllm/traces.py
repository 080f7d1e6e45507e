"""Request traces whose prefix structure is known, and what a cache without limits would hit.

A trace is a list of requests with the ids of their blocks: an equal id at an equal place means
equal tokens after an equal prefix. The real one is not part of the project; where it is missing a
generated one of the same shape takes its place.
"""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 32
REAL_TRACE = Path(__file__).parents[4] / "shared/traces/mooncake_conversation_s16_thin96.jsonl.gz"


@dataclass(frozen=True)
class TraceRequest:
    """One request: its length and the ids of its blocks, the last of which may be cut short."""

    input_tokens: int
    block_ids: tuple[int, ...]

    def tokens(self, first_token: int = 1000, last_token: int = 40_000) -> list[int]:
        """Its prompt: every id stands for the same tokens wherever it occurs."""
        tokens: list[int] = []
        for block_id in self.block_ids:
            rng = random.Random(block_id)
            tokens += [rng.randint(first_token, last_token) for _ in range(BLOCK_TOKENS)]
        return tokens[: self.input_tokens]


def conversation_trace() -> list[TraceRequest]:
    """The real trace if it is there, else a generated one."""
    return read_trace(REAL_TRACE) if REAL_TRACE.exists() else generated_trace(seed=0)


def read_trace(path: Path) -> list[TraceRequest]:
    """A file in Mooncake's format, its ids taken as blocks of `BLOCK_TOKENS` tokens."""
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in lines]
    return [TraceRequest(record["input_length"], tuple(record["hash_ids"])) for record in records]


def generated_trace(seed: int, request_count: int = 128) -> list[TraceRequest]:
    """Chats in turns: all begin with one system block, most have one turn, a few have many.

    A turn's prompt is the last one, what was answered, and something new; prompts have a long tail
    of lengths, and most end inside a block.
    """
    rng = random.Random(seed)
    next_id = iter(range(1, 1 << 30)).__next__
    chats: list[tuple[int, ...]] = []
    trace: list[TraceRequest] = []
    for _ in range(request_count):
        if chats and rng.random() < 0.4:
            place = rng.randrange(max(0, len(chats) - 60), len(chats))
            past = chats.pop(place)
        else:
            past = (0,)
        new_blocks = min(120, 1 + int(rng.lognormvariate(2.3, 1.0)))
        block_ids = past + tuple(next_id() for _ in range(new_blocks))
        if len(block_ids) < 200:
            # A cut block ends a prompt; the next turn has other tokens in its place.
            chats.append(block_ids[:-1])
        cut_tokens = rng.randrange(BLOCK_TOKENS)
        trace.append(TraceRequest(len(block_ids) * BLOCK_TOKENS - cut_tokens, block_ids))
    return trace


def infinite_cache_hit_tokens(trace: Sequence[TraceRequest]) -> int:
    """Tokens that a cache which forgets nothing would serve, one request after the other.

    Whole blocks only, from the start without a hole, and never a prompt's last token.
    """
    seen: set[tuple[int, ...]] = set()
    hit_tokens = 0
    for request in trace:
        paths = _whole_block_paths(request)
        hit_blocks = 0
        while hit_blocks < (request.input_tokens - 1) // BLOCK_TOKENS and paths[hit_blocks] in seen:
            hit_blocks += 1
        hit_tokens += hit_blocks * BLOCK_TOKENS
        seen.update(paths)
    return hit_tokens


def whole_block_paths(trace: Sequence[TraceRequest]) -> set[tuple[int, ...]]:
    """Every distinct whole block of a trace, named by itself and all before it."""
    return {path for request in trace for path in _whole_block_paths(request)}


def _whole_block_paths(request: TraceRequest) -> list[tuple[int, ...]]:
    whole_blocks = request.input_tokens // BLOCK_TOKENS
    return [request.block_ids[:count] for count in range(1, whole_blocks + 1)]
