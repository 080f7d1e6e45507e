"""Opal's hash chain against vLLM's default block hasher, on the same tokens of the same requests.

Both read `request.all_token_ids` of one real vLLM `Request`; vLLM's side is what its engine core
installs with the default `--prefix-caching-hash-algo`.
"""

import random
import statistics
import time
from collections.abc import Callable

from common import (
    Figures,
    OtherLoad,
    at_least,
    at_most,
    emit,
    interleaved,
    machine_facts,
    median_ratio,
    parser,
)
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from opal_connector.keys import OpalTokenDatabase, RequestIdentity, TokenChain

PROMPT_TOKENS = 8192
VOCABULARY = 49152
BLOCK_SIZES = (16, 32, 128)
GROWN_BLOCKS = 32
LONG_TOKENS = 131072

Hasher = Callable[[Request], list[bytes]]


def make_request(tokens: list[int], name: str = "request") -> Request:
    """A request without a hasher of its own, so that only what is timed hashes."""
    return Request(name, list(tokens), SamplingParams(max_tokens=1), None)


def whole_prompt(
    request: Request, hasher: Hasher, block_tokens: int, repetitions: int
) -> dict[str, list[float]]:
    """Seconds to hash all blocks of the prompt, each from an empty chain."""
    database = OpalTokenDatabase(block_tokens=block_tokens, chunk_blocks=1)
    identity = RequestIdentity()

    def ours() -> None:
        database.chain(identity).extend(request.all_token_ids)

    return interleaved(
        {"opal": ours, "vllm": lambda: hasher(request) and None}, repetitions=repetitions, warm_up=3
    )


def growth(
    tokens: list[int], more: list[int], hasher: Hasher, block_tokens: int, repetitions: int
) -> tuple[dict[str, list[float]], set[int]]:
    """Seconds per block while a hashed request grows block by block, and blocks hashed a time."""
    hashed: set[int] = set()
    requests: dict[str, Request] = {}
    chains: dict[str, TokenChain] = {}

    def ours() -> float:
        request = requests["opal"] = make_request(tokens)
        chain = chains["opal"] = TokenChain(RequestIdentity(), block_tokens)
        chain.extend(request.all_token_ids)
        seconds = 0.0
        for start in range(0, len(more), block_tokens):
            request.append_output_token_ids(more[start : start + block_tokens])
            began = time.perf_counter()
            count = chain.extend(request.all_token_ids)
            seconds += time.perf_counter() - began
            hashed.add(count)
        return seconds / (len(more) // block_tokens)

    def theirs() -> float:
        request = requests["vllm"] = make_request(tokens)
        request.block_hashes.extend(hasher(request))
        seconds = 0.0
        for start in range(0, len(more), block_tokens):
            request.append_output_token_ids(more[start : start + block_tokens])
            began = time.perf_counter()
            request.block_hashes.extend(hasher(request))
            seconds += time.perf_counter() - began
        assert len(request.block_hashes) == len(chains["opal"].hashes)
        return seconds / (len(more) // block_tokens)

    return interleaved({"opal": ours, "vllm": theirs}, repetitions=repetitions), hashed


def microseconds(seconds: list[float], count: int = 1) -> float:
    """The median, per item."""
    return statistics.median(seconds) / count * 1e6


def main() -> None:
    """Run and print."""
    arguments = parser(__doc__).parse_args()
    facts = machine_facts()
    load = OtherLoad()
    algorithm = CacheConfig().prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_function)
    random_tokens = random.Random(1)
    tokens = [random_tokens.randrange(VOCABULARY) for _ in range(LONG_TOKENS)]
    request = make_request(tokens[:PROMPT_TOKENS])
    repetitions = 15 if arguments.quick else 101
    figures: Figures = {
        "vllm_hash_algorithm": algorithm,
        "prompt_tokens": PROMPT_TOKENS,
        "block_size": {},
    }
    bars = {}
    for block_tokens in BLOCK_SIZES:
        hasher = get_request_block_hasher(block_tokens, hash_function)
        whole = whole_prompt(request, hasher, block_tokens, repetitions)
        more = tokens[: GROWN_BLOCKS * block_tokens]
        grown, hashed = growth(
            tokens[:PROMPT_TOKENS], more, hasher, block_tokens, max(5, repetitions // 4)
        )
        long, _ = growth(tokens, more, hasher, block_tokens, 5)
        blocks = PROMPT_TOKENS // block_tokens
        faster = median_ratio(whole["vllm"], whole["opal"])
        grown_faster = median_ratio(grown["vllm"], grown["opal"])
        figures["block_size"][str(block_tokens)] = {
            "opal_prompt_us": microseconds(whole["opal"]),
            "vllm_prompt_us": microseconds(whole["vllm"]),
            "opal_us_per_block": microseconds(whole["opal"], blocks),
            "vllm_us_per_block": microseconds(whole["vllm"], blocks),
            "opal_growth_us_per_block": microseconds(grown["opal"]),
            "vllm_growth_us_per_block": microseconds(grown["vllm"]),
            f"opal_growth_us_per_block_at_{LONG_TOKENS}_tokens": microseconds(long["opal"]),
            "growth_faster": round(grown_faster, 2),
            "blocks_hashed_per_grown_block": sorted(hashed),
        }
        bars[f"faster_{block_tokens}"] = at_least(faster, 2.0)
        bars[f"growth_hashes_{block_tokens}"] = at_most(max(hashed), 1)
    statistic = f"medians of {repetitions} interleaved rounds; ratios are medians over rounds"
    figures["cores_used_by_others"] = round(load.cores(), 2)
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


if __name__ == "__main__":
    main()
