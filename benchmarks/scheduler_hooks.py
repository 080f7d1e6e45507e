"""What Opal's scheduler-side hooks add to a step of vLLM's scheduler, with small and large books.

The connector is the real one in its scheduler role, over real vLLM requests and a real block pool;
only the scheduler around it is a loop here. Books are filled through the manager, request by
request, as serving fills them, and the pool is exactly full then, so that every store has to evict.
The heap is frozen before the books are filled, as vLLM's engine core freezes it when it is ready,
and the garbage collector runs.

The time is the thread's processor time: no hook waits for anything, so on an idle machine it is the
wall time, and on a busy one it leaves out the time in which the thread was not running. The wall
time's p99 is shown beside it.
"""

import argparse
import gc
import time

from common import Figures, OtherLoad, at_most, emit, machine_facts, note, parser, percentile
from hooked_engine import (
    BLOCK_TOKENS,
    BOOKS,
    PROMPT_TOKENS,
    RESULT_STEPS,
    RUNNING,
    TURNOVER_STEPS,
    Engine,
)
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.request import Request

SIZES = (1_000, 10_000, 100_000, 1_000_000)
BAR_SECONDS = 0.001
FLAT_BAR = 2.0


def prepare(chunk_tokens: int, chunk_count: int, shape: str) -> tuple[Engine, Request]:
    """An engine with filled books, 64 requests under way and one that waits and would hit."""
    engine = Engine(chunk_tokens=chunk_tokens, chunk_count=chunk_count)
    engine.fill(chunk_count, shape)
    waiting = engine.new_request()
    engine.store_request(waiting)
    engine.connector.on_new_request(waiting)
    for _ in range(RUNNING):
        engine.admit(phase=engine.random.randrange(chunk_tokens))
        for _ in range(RESULT_STEPS + 1):
            engine.step()  # its prompt is stored now
    return engine, waiting


def run(chunk_tokens: int, sizes: tuple[int, ...], shape: str, steps: int) -> Figures:
    """Figures by size; the engines take their steps in turn."""
    gc.unfreeze()
    gc.collect()
    freeze_gc_heap()
    engines: dict[int, tuple[Engine, Request]] = {}
    first_eviction: dict[int, float] = {}
    for size in sizes:
        engines[size] = prepare(chunk_tokens, size, shape)
        first_eviction[size] = engines[size][0].first_eviction()
    decode: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    turnover: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for engine, waiting in engines.values():
        for _ in range(50):
            engine.step(waiting)
        engine.end_step()
        engine.hook_seconds.clear()
    collections = gc.get_stats()[2]["collections"]
    for _ in range(steps):
        for size, (engine, waiting) in engines.items():
            engine.step(waiting)
            decode[size].append(engine.end_step())
    by_hook = {size: dict(engine.hook_seconds) for size, (engine, _) in engines.items()}
    for number in range(steps // 2):
        for size, (engine, waiting) in engines.items():
            if number % TURNOVER_STEPS == 0:
                engine.finish_one()
            engine.step(waiting)
            turnover[size].append(engine.end_step())
    began = time.thread_time()
    gc.collect()
    collected = time.thread_time() - began
    collections = gc.get_stats()[2]["collections"] - collections - 1
    figures: Figures = {}
    for size, (engine, _) in engines.items():
        engine.manager.check()
        figures[str(size)] = {
            **_summary(decode[size]),
            "with_turnover": _summary(turnover[size]),
            "first_eviction_us": first_eviction[size] * 1e6,
            "mean_us_by_hook": {
                hook: seconds / steps * 1e6 for hook, seconds in by_hook[size].items()
            },
        }
    figures["full_collection_ms"] = collected * 1e3
    figures["full_collections_while_measured"] = collections
    return figures


def _summary(steps: list[tuple[float, float]]) -> Figures:
    seconds = [step for step, _ in steps]
    return {
        "p50_us": percentile(seconds, 50) * 1e6,
        "p99_us": percentile(seconds, 99) * 1e6,
        "max_us": max(seconds) * 1e6,
        "wall_p99_us": percentile([wall for _, wall in steps], 99) * 1e6,
    }


def main() -> None:
    """Run and print."""
    arguments = _arguments()
    facts = machine_facts()
    load = OtherLoad()
    steps = 400 if arguments.quick else 2000
    sizes = SIZES[:3] if arguments.quick else SIZES
    figures: Figures = {
        "running": RUNNING,
        "prompt_tokens": PROMPT_TOKENS,
        "steps": steps,
        "block_tokens": BLOCK_TOKENS,
    }
    bars = {}
    smallest, largest = sizes[0], sizes[-1]
    for chunk_tokens in arguments.chunk_tokens:
        for shape in BOOKS:
            if chunk_tokens == BLOCK_TOKENS and shape != "distinct":
                continue
            note(f"chunks of {chunk_tokens} tokens, {shape} chains ...")
            found = figures[f"chunk_{chunk_tokens}_{shape}"] = run(
                chunk_tokens, sizes, shape, steps
            )
            if chunk_tokens == BLOCK_TOKENS:
                continue
            p99 = {size: found[str(size)]["p99_us"] for size in sizes}
            bars[f"{shape}_p99_ms_at_{largest}"] = at_most(p99[largest] / 1e3, BAR_SECONDS * 1e3)
            bars[f"{shape}_p99_{largest}_to_{smallest}"] = at_most(
                p99[largest] / p99[smallest], FLAT_BAR
            )
            turned = found[str(largest)]["with_turnover"]["p99_us"]
            bars[f"{shape}_turnover_p99_ms_at_{largest}"] = at_most(turned / 1e3, BAR_SECONDS * 1e3)
    statistic = f"percentiles over {steps} steps, the sizes taking their steps in turn"
    figures["cores_used_by_others"] = round(load.cores(), 2)
    emit(arguments, facts=facts, statistic=statistic, figures=figures, bars=bars)


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--chunk-tokens",
        type=int,
        nargs="+",
        default=[256, BLOCK_TOKENS],
        help="chunk sizes; only those above one block have bars",
    )
    return made.parse_args()


if __name__ == "__main__":
    main()
