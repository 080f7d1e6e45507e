"""Served throughput with Opal and nothing to reuse, against vLLM without a connector.

Eight clients send distinct prompts of random tokens and have some tokens generated, so prefill and
decode are mixed and every block is stored and never read. Two engines cannot take turns in one
process: servers are started one after the other, without and with Opal in turn, and each pair of
neighbours gives one ratio. Within a server several batches are timed; a batch beside which other
processes used more than a tenth of a core counts only if too few were quiet.
"""

import argparse
import contextlib
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from common import QUIET_CORES, Figures, at_least, emit, machine_facts, note, parser
from serving import Server, opal_plan, scratch, started, vllm_plan

from opal_connector.cli.models import SMOLLM2_LAYERS, ensure_smollm2

CLIENTS = 8
PROMPT_TOKENS = (128, 768)
OUTPUT_TOKENS = 32
REQUESTS = 48
VOCABULARY = (1000, 49000)
TIER_CAPACITY = "256MiB"  # less than a server is given to store, so that it evicts too
BAR = 0.97


def batch(server: Server, http: httpx.Client, seed: int) -> tuple[float, float]:
    """Tokens a second over one batch of requests, and the cores that others used meanwhile."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(*VOCABULARY) for _ in range(rng.randrange(*PROMPT_TOKENS))]
        for _ in range(REQUESTS)
    ]

    def ask(prompt: list[int]) -> int:
        body = {
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = http.post("/v1/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        return int(usage["prompt_tokens"] + usage["completion_tokens"])

    load = server.load()
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        tokens = sum(clients.map(ask, prompts))
    seconds = time.perf_counter() - began
    return tokens / seconds, load.cores()


def one_server(model: Path, *, with_opal: bool, batches: int) -> tuple[list[float], list[float]]:
    """Tokens a second and the others' load of every batch of one server."""
    with scratch() as logs:
        plan = opal_plan(model, logs, TIER_CAPACITY) if with_opal else vllm_plan(model, logs)
        with (
            started(plan) as server,
            httpx.Client(base_url=server.running.url, timeout=600, trust_env=False) as http,
        ):
            batch(server, http, seed=0)
            timed = [batch(server, http, seed=1 + number) for number in range(batches)]
    return [rate for rate, _ in timed], [others for _, others in timed]


def quiet(rates: list[float], others: list[float]) -> list[float]:
    """The rates that nobody disturbed; all of them if those are less than half."""
    kept = [rate for rate, load in zip(rates, others, strict=True) if load <= QUIET_CORES]
    return kept if len(kept) * 2 >= len(rates) else rates


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    facts = machine_facts()
    model = ensure_smollm2(layers=arguments.layers)
    pairs = 2 if arguments.quick else arguments.pairs
    batches = 2 if arguments.quick else arguments.batches
    plain: list[float] = []
    opal: list[float] = []
    everything: dict[str, list[list[float]]] = {"plain": [], "opal": [], "others": []}
    for number in range(pairs):
        note(f"pair {number + 1} of {pairs} ...")
        # Whoever comes first in a pair comes second in the next: a drift falls on both.
        for with_opal in (False, True) if number % 2 == 0 else (True, False):
            rates, others = one_server(model, with_opal=with_opal, batches=batches)
            (opal if with_opal else plain).append(statistics.median(quiet(rates, others)))
            everything["opal" if with_opal else "plain"].append(rates)
            everything["others"].append(others)
    ratios = [ours / theirs for ours, theirs in zip(opal, plain, strict=True)]
    spread = max(max(plain) / min(plain), max(opal) / min(opal)) - 1
    figures: Figures = {
        "layers": arguments.layers,
        "clients": CLIENTS,
        "requests_per_batch": REQUESTS,
        "plain_tokens_per_s": statistics.median(plain),
        "opal_tokens_per_s": statistics.median(opal),
        "ratio_of_each_pair": [round(ratio, 4) for ratio in ratios],
        "spread_between_equal_servers": spread,
        "all_plain_tokens_per_s": [round(rate, 1) for run in everything["plain"] for rate in run],
        "all_opal_tokens_per_s": [round(rate, 1) for run in everything["opal"] for rate in run],
        "others_cores": [round(cores, 2) for run in everything["others"] for cores in run],
    }
    bars = {"throughput": at_least(statistics.median(ratios), BAR)}
    statistic = f"median ratio of {pairs} pairs of servers, each the median of {batches} batches"
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--layers",
        type=int,
        default=4,
        help=f"of SmolLM2; {SMOLLM2_LAYERS} is the whole model, and slow",
    )
    made.add_argument("--pairs", type=int, default=4)
    made.add_argument("--batches", type=int, default=3)
    return made.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
