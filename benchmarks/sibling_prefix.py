"""Prompt tokens that siblings hit: vLLM's own prefix cache against Opal, with memory to spare.

Families of prompts share a prefix and differ in their tails. Each family asks for a first sibling,
a second and a third, the first again, and a next turn that carries the first's answer on. vLLM
alone keeps what its retention interval says, although its device has room for everything; Opal is
measured with the device's prefix cache emptied before every prompt (external hits only) and with
both. Hit tokens are counted per kind of prompt.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import Figures, at_least, emit, machine_facts, note, parser

from opal_connector.cli.model_library import ensure_named, model_names
from opal_connector.cli.server_process import opal_transfer_config

ANSWER_TOKENS = 16
DEVICE_BLOCKS = 2048
CONTEXT_TOKENS = 4096
RETENTIONS: dict[str, int | None] = {"0 (default)": 0, "256": 256, "None (dense)": None}
SCENES = ("first", "sibling", "second_sibling", "resend", "next_turn")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Run:
    """One engine: with which connector, which retention, and whether its device forgets."""

    model: str
    families: int
    shared_tokens: int
    tail_tokens: int
    retention: int | None
    has_opal: bool
    forgets: bool = False


@dataclass
class Hits:
    """Hit tokens by kind of prompt, all prompt tokens, and the answers to compare."""

    tokens: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Over all kinds of prompt."""
        return sum(self.tokens.values())


def measure(run: Run) -> Hits:
    """Serve all prompts in an engine of this process, one at a time."""
    from vllm import LLM, SamplingParams

    model, settings = ensure_named(run.model)
    more: dict[str, Any] = {"prefix_cache_retention_interval": run.retention}
    if run.has_opal:
        more["kv_transfer_config"] = opal_transfer_config({"CPUMemory": {"capacity_GB": "1GiB"}})
    engine = LLM(
        model=str(model),
        enforce_eager=True,
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=4,
        num_gpu_blocks_override=DEVICE_BLOCKS,
        enable_prefix_caching=True,
        **{**settings.keywords(), **more},
    )
    core = engine.llm_engine.engine_core.engine_core
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    hits = Hits(dict.fromkeys(SCENES, 0))

    def serve(scene: str, tokens: list[int]) -> list[int]:
        if run.forgets and not engine.reset_prefix_cache():
            raise RuntimeError("the device still holds blocks that nobody reads")
        output = engine.generate({"prompt_token_ids": tokens}, sampling, use_tqdm=False)[0]
        while core.scheduler.has_requests():  # stores that are still under way
            engine.llm_engine.step()
        hits.tokens[scene] += output.num_cached_tokens or 0
        hits.prompt_tokens += len(tokens)
        answer = list(output.outputs[0].token_ids)
        hits.answers.append(answer)
        return answer

    for family in range(run.families):
        _serve_family(run, random.Random(family), serve)
    engine.llm_engine.engine_core.shutdown()
    return hits


def _serve_family(run: Run, generator: random.Random, serve: Any) -> None:
    """The prompts of one family, every tail of another length."""

    def tokens(count: int) -> list[int]:
        return [generator.randrange(ord(" "), ord("~") + 1) for _ in range(count)]

    shared = tokens(run.shared_tokens + generator.randrange(16))
    prompts = [shared + tokens(run.tail_tokens + generator.randrange(32)) for _ in range(3)]
    answer = serve("first", prompts[0])
    serve("sibling", prompts[1])
    serve("second_sibling", prompts[2])
    serve("resend", prompts[0])
    serve("next_turn", prompts[0] + answer + tokens(run.tail_tokens))


def in_child(run: Run) -> Hits:
    """The run in a process of its own: vLLM keeps a connector for as long as its process lives."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(asdict(run))]
    finished = subprocess.run(
        command,
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{run} failed:\n{finished.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(finished.stdout.strip().splitlines()[-1])
    return Hits(**found)


def compare(base: Run, retentions: dict[str, int | None]) -> tuple[Figures, dict[str, Any]]:
    """All engines over the prompts of one model, and what of it must hold."""
    runs: dict[str, Run] = {}
    for label, retention in retentions.items():
        runs[f"vllm, retention {label}"] = _with(base, retention=retention, has_opal=False)
    runs["opal, device emptied"] = _with(base, retention=0, has_opal=True, forgets=True)
    runs["opal and device"] = _with(base, retention=0, has_opal=True)
    hits: dict[str, Hits] = {}
    for label, run in runs.items():
        note(f"{base.model}: {label} ...")
        hits[label] = in_child(run)
    first = next(iter(hits.values()))
    figures = {
        label: {**found.tokens, "total": found.total, "prompt_tokens": found.prompt_tokens}
        for label, found in hits.items()
    }
    figures["answers_equal"] = all(found.answers == first.answers for found in hits.values())
    bars = {f"{base.model}: answers_equal": at_least(float(figures["answers_equal"]), 1.0)}
    for ours in ("opal, device emptied", "opal and device"):
        for label, retention in retentions.items():
            # Where vLLM keeps little of a window's blocks Opal must find more, elsewhere not less.
            is_sparse = retention is not None and _has_windows(base.model)
            bar = hits[f"vllm, retention {label}"].total + is_sparse
            name = f"{base.model}: {ours} over vllm {label}"
            bars[name] = at_least(hits[ours].total, bar)
    return figures, bars


def _has_windows(model: str) -> bool:
    """Whether layers of this model look back on a window only, of which vLLM keeps little."""
    return any(part in model for part in ("gemma3", "gpt-oss", "mistral"))


def _with(base: Run, **changes: Any) -> Run:
    return Run(**{**asdict(base), **changes})


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    if arguments.child:
        print(json.dumps(asdict(measure(Run(**json.loads(arguments.child))))))
        return
    facts = machine_facts()
    retentions = {"0 (default)": 0} if arguments.quick else RETENTIONS
    figures: Figures = {}
    bars: dict[str, Any] = {}
    for model in arguments.models:
        base = Run(
            model=model,
            families=2 if arguments.quick else arguments.families,
            shared_tokens=arguments.shared_tokens,
            tail_tokens=arguments.tail_tokens,
            retention=0,
            has_opal=False,
        )
        figures[model], more = compare(base, retentions)
        bars.update(more)
    statistic = "prompt tokens that were not computed, summed over all families"
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--models", nargs="+", default=["tiny-gemma3"], choices=model_names(), metavar="NAME"
    )
    made.add_argument("--families", type=int, default=6)
    made.add_argument("--shared-tokens", type=int, default=400)
    made.add_argument("--tail-tokens", type=int, default=100)
    made.add_argument("--child", help=argparse.SUPPRESS)
    return made.parse_args()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
