"""Time to the first token of a long prompt: computed, from the device, from Opal's host memory.

One server with the real SmolLM2-135M answers several different prompts of about 2,000 tokens. Each
is computed once, then asked again while the device has it, then several times after the device's
prefix cache was emptied. With `--peer lmcache`, LMCache's multi-process server gets the same
prompts in the same order in its own vLLM.
"""

import argparse
import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from common import Figures, at_least, at_most, emit, machine_facts, note, parser
from serving import Server, has_lmcache, lmcache_server, opal_plan, scratch, started

from opal_connector.cli.demo import demo_prompt
from opal_connector.cli.models import ensure_smollm2

PROMPT_TOKENS = 2048
OUTPUT_TOKENS = 4
AGAIN = 3
SETTLE_SECONDS = 1.0
_HITS = "vllm:external_prefix_cache_hits_total"


@dataclass
class Seconds:
    """Times to the first token, several prompts each asked again and again."""

    cold: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    are_outputs_equal: bool = True

    def add(self, more: "Seconds") -> None:
        """Add another pass."""
        for name in ("cold", "device", "warm", "hit_tokens", "prompt_tokens", "others"):
            getattr(self, name).extend(getattr(more, name))
        self.are_outputs_equal &= more.are_outputs_equal

    def figures(self) -> Figures:
        """Medians, and every single value."""
        return {
            "cold_s": statistics.median(self.cold),
            "device_s": statistics.median(self.device),
            "warm_s": statistics.median(self.warm),
            "all_cold_s": self.cold,
            "all_device_s": self.device,
            "all_warm_s": self.warm,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "outputs_equal": self.are_outputs_equal,
            "cores_used_by_others": round(max(self.others), 2),
        }


def measure(server: Server, prompts: list[str]) -> Seconds:
    """Every prompt cold, from the device and from the connector's tier."""
    seconds = Seconds()
    client = server.client
    client.complete("Good morning! The weather today is", max_tokens=4)
    for prompt in prompts:
        load = server.load()
        cold = client.complete(prompt, max_tokens=OUTPUT_TOKENS)
        seconds.cold.append(cold.ttft_seconds)
        seconds.prompt_tokens.append(cold.prompt_tokens)
        for _ in range(AGAIN):
            time.sleep(SETTLE_SECONDS)
            device = client.complete(prompt, max_tokens=OUTPUT_TOKENS)
            seconds.device.append(device.ttft_seconds)
            client.reset_prefix_cache()
            time.sleep(SETTLE_SECONDS)
            before = _external_hits(server)
            warm = client.complete(prompt, max_tokens=OUTPUT_TOKENS)
            seconds.warm.append(warm.ttft_seconds)
            time.sleep(SETTLE_SECONDS)
            seconds.hit_tokens.append(_external_hits(server) - before)
            answers = {cold.token_ids, device.token_ids, warm.token_ids}
            seconds.are_outputs_equal &= len(answers) == 1
        seconds.others.append(load.cores())
    return seconds


def _external_hits(server: Server) -> int:
    return round(sum(s.value for s in server.client.samples() if s.name == _HITS))


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    facts = machine_facts()
    model = ensure_smollm2()
    text = demo_prompt(model / "tokenizer.json", PROMPT_TOKENS)
    count = 2 if arguments.quick else arguments.prompts
    # The number comes first, so that no two prompts share a block.
    prompts = [f"{number} is the number of this text.\n{text}" for number in range(count)]
    opal, peer = Seconds(), Seconds()
    for _ in range(1 if arguments.quick else arguments.passes):
        with scratch() as logs:
            note("vLLM with Opal ...")
            with started(opal_plan(model, logs)) as server:
                opal.add(measure(server, prompts))
            if arguments.peer:
                note("vLLM with LMCache ...")
                with lmcache_server(model, logs, arguments.peer_python) as server:
                    peer.add(measure(server, prompts))
    found = opal.figures()
    figures: Figures = {"opal": found}
    bars = {
        "cold_to_warm": at_least(found["cold_s"] / found["warm_s"], 20),
        "warm_to_device": at_most(found["warm_s"] / found["device_s"], 1.3),
    }
    if arguments.peer:
        figures["lmcache"] = peer.figures()
        ratio = found["warm_s"] / figures["lmcache"]["warm_s"]
        bars["warm_to_lmcache_warm"] = at_most(ratio, 0.7)
    statistic = f"medians over {len(opal.cold)} cold and {len(opal.warm)} warm answers"
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--prompts", type=int, default=3, help="different prompts in a pass")
    made.add_argument("--passes", type=int, default=2, help="times that each server is started")
    made.add_argument("--peer", choices=["lmcache"], help="compare with this one too")
    made.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the interpreter that has the peer and its own vLLM (default: this one)",
    )
    arguments = made.parse_args()
    if arguments.peer and not has_lmcache(arguments.peer_python):
        made.error(f"{Path(arguments.peer_python).name} cannot import lmcache")
    return arguments


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
