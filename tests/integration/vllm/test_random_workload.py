"""Random requests, faults, aborts and resets: no wrong token, no book that disagrees, nothing left.

Every run has fixed seeds. Transfers end late, in any order and independently on every rank; the
device and the tier are so small that requests are preempted and objects evicted all the time.
"""

import contextlib
import random
from collections import Counter

import pytest

pytest.importorskip("vllm")

from byte_model import Identity
from engine_without_model import Engine
from transfer_fakes import FailingTier, flip_bit
from vllm.distributed.kv_events import BlockRemoved
from vllm_parts import announced, prompt, replay

pytestmark = pytest.mark.vllm

IDENTITIES = [Identity()] * 5 + [Identity(salt="x"), Identity(lora="a")]


class Workload:
    """One run: what is sent, what goes wrong, and what must hold all the time."""

    def __init__(self, seed: int, *, requests: int = 40, **options: object) -> None:
        self.rng = rng = random.Random(seed)
        self.left = requests
        self.live: list[str] = []
        self.aborted: set[str] = set()
        self.policy = rng.choice(["recompute", "recompute", "fail"])
        self.engine = Engine(
            num_blocks=rng.choice([12, 18, 30]),
            tier_blocks=rng.choice([8, 20, 60]),
            chunk_blocks=rng.choice([1, 2, 4]),
            batch_tokens=rng.choice([32, 64, 256]),
            max_requests=rng.choice([4, 8]),
            max_kvc_ready_requests=rng.choice([1, 3, 8]),
            prefix_caching=rng.random() < 0.7,
            save_unfull_chunk=rng.random() < 0.8,
            policy=self.policy,
            wrap_tier=FailingTier,
            **{"transfers": "manual", **options},
        )
        self.has_damage = rng.random() < 0.6
        if self.has_damage:
            for rank in range(self.engine.model.ranks):
                self.engine.tier(rank).fails_read = lambda item: rng.random() < 0.1
                self.engine.tier(rank).fails_write = lambda item: rng.random() < 0.1

    def run(self) -> None:
        """Until nothing is left to do."""
        engine = self.engine
        for _ in range(3000):
            self.send()
            self.disturb()
            if not self.left and not engine.scheduler.has_requests():
                break
            engine.step()
            engine.clock.now += 0.02
            self.move()
            self.look()
        for rank in range(engine.model.ranks):
            if hasattr(engine.mover(rank), "is_inline"):
                engine.mover(rank).is_inline = True
                engine.mover(rank).run()
        engine.run()

    def send(self) -> None:
        """New requests share prefixes, or continue what an earlier one answered."""
        rng, engine = self.rng, self.engine
        while self.left and rng.random() < 0.3:
            self.left -= 1
            name = f"r{self.left}"
            longest = (engine.pool.num_gpu_blocks - 1) * 16 - 20
            tokens = prompt(rng.randrange(3), rng.randrange(1, 120))
            if engine.results and rng.random() < 0.3:
                earlier = rng.choice(list(engine.results))
                tokens = [*engine.requests[earlier].prompt_token_ids]
                tokens += engine.results[earlier].tokens + prompt(rng.randrange(9), 10)
            tokens = tokens[: longest - 40]
            engine.add(
                name,
                tokens,
                max_tokens=rng.randrange(1, 40),
                identity=rng.choice(IDENTITIES),
                skip_reading=True if rng.random() < 0.1 else None,
            )
            self.live.append(name)

    def disturb(self) -> None:
        """Clients that go away, operators that reset, memory that rots."""
        rng, engine = self.rng, self.engine
        self.live = [name for name in self.live if not engine.results[name].finish_reason]
        if self.live and rng.random() < 0.025:
            name = rng.choice(self.live)
            if not engine.requests[name].is_finished():
                engine.abort(name)
                self.aborted.add(name)
            self.live.remove(name)
        if rng.random() < 0.01:
            engine.scheduler.reset_connector_cache()
        if rng.random() < 0.01:
            with contextlib.suppress(RuntimeError):  # blocks are held for a load or a store
                engine.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        if self.has_damage and rng.random() < 0.05:
            rows = engine.tier().tier.rows
            flip_bit(rows, rng.randrange(len(rows)), byte=rng.randrange(rows.shape[1]))

    def move(self) -> None:
        """Some transfers end, not the oldest first, not on all ranks at once."""
        for rank in range(self.engine.model.ranks):
            mover = self.engine.mover(rank)
            if hasattr(mover, "pending") and self.rng.random() < 0.4:
                jobs = self.rng.sample(mover.pending, self.rng.randint(0, len(mover.pending)))
                mover.run(jobs)

    def look(self) -> None:
        """The bounds that hold at any time."""
        engine = self.engine
        (tier,) = engine.manager.storage.tiers
        assert tier.used_bytes <= tier.capacity_bytes
        waiting = [r for r in engine.requests.values() if r.status.name == "WAITING_FOR_REMOTE_KVS"]
        assert len(waiting) <= engine.half._config.max_kvc_ready_requests

    def check(self) -> None:
        """Every answer is right, and the books are as if nothing had happened."""
        engine = self.engine
        for name, result in engine.results.items():
            expected = engine.expected(name)
            may_err = self.policy == "fail" and result.finish_reason == "error"
            if name in self.aborted or may_err:
                assert result.tokens == expected[: len(result.tokens)], name
            else:
                assert result.finish_reason == "length", name
                assert result.tokens == expected, name
        engine.assert_idle()
        assert replay(engine.events) == announced(engine.held_hashes())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"ranks": 2}, id="two_ranks"),
        pytest.param({"async_steps": True, "v2_runner": True}, id="async_v2"),
        pytest.param({"spec_tokens": 3}, id="drafts"),
    ],
)
def test_random_workload(options: dict[str, object], seed: int) -> None:
    """Outputs equal those without a cache; books are audited at every step; all ends at zero."""
    workload = Workload(seed, **options)
    workload.run()

    workload.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_workload_with_real_threads(seed: int) -> None:
    """The same with the threads that move bytes in production."""
    workload = Workload(100 + seed, requests=60, transfers="threads", ranks=1 + seed % 2)
    workload.run()

    workload.check()
    workload.engine.close()


def test_random_workload_is_worth_its_time() -> None:
    """The runs above really hit, wait, evict, preempt, abort, and lose loads."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        workload = Workload(seed)
        workload.run()
        engine = workload.engine
        seen["hit_tokens"] += sum(r.hit_tokens for r in engine.results.values() if r.params)
        seen["preemptions"] += sum(r.num_preemptions for r in engine.requests.values())
        seen["waits"] += sum(lookup.matched_tokens is None for lookup in engine.lookups)
        seen["aborts"] += len(workload.aborted)
        seen["load_errors"] += len(engine.load_errors)
        seen["removals"] += sum(isinstance(event, BlockRemoved) for event in engine.events)

    assert seen["hit_tokens"] > 500
    assert min(seen[name] for name in ("preemptions", "waits", "aborts", "removals")) > 10
    assert seen["load_errors"] >= 1
