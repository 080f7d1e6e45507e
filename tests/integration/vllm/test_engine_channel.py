"""A real engine's event channel: its device is vLLM's own cache, its tiers are the books."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_process import BLOCK_TOKENS, EngineProcess, opal, running_engine
from prompts import greedy, random_tokens, request
from publisher_world import Listener, Present, blocks_in, blocks_of, held, wait_until
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.keys import RequestIdentity, TokenChain

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEVICE_BLOCKS = 48
BLOCK_BYTES = 32 << 10


class Names:
    """Opal's digests by vLLM's hashes, computed from the tokens by each one's own rules.

    Mutable state: the digests known.
    """

    def __init__(self) -> None:
        self._hash = get_hash_fn_by_name("sha256")
        init_none_hash(self._hash)
        self.digests: dict[bytes, bytes] = {}

    def learn(self, tokens: list[int], salt: str | None) -> None:
        chain = TokenChain(RequestIdentity(cache_salt=salt), BLOCK_TOKENS)
        chain.extend(tokens)
        parent = None
        for number, digest in enumerate(chain.hashes):
            block = tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            extras = (("cache_salt", salt),) if salt and number == 0 else None
            parent = hash_block_tokens(self._hash, parent, block, extras)
            self.digests[parent] = digest


def requests_of(wave: int) -> list[dict[str, Any]]:
    """Prompts with shared beginnings, some salted, some answers longer than a block."""
    made = []
    for number in range(6):
        tokens = random_tokens(160, seed=number % 3, last=255)
        tokens += random_tokens(40 * (number % 4), seed=100 * wave + number, last=255)
        more = {"salt": "pepper"} if number % 3 == 2 else {}
        made.append(request(tokens, sampling=greedy(4 + 40 * (number % 2)), **more))
    return made


def contents(engine: EngineProcess, names: Names) -> Present:
    """What vLLM's map and the books hold."""
    now = engine.call("channel")
    present: Present = {(0, "Device"): {names.digests[block] for block in now["device"]}}
    for tier, runs in now["tiers"].items():
        present[0, tier] = {block for run in runs for block in blocks_of(run)}
    return held(present)


def test_device_and_tiers_are_what_the_channel_says(tmp_path: Path) -> None:
    """A mixed load over a device and a memory that are too small, with resets in between."""
    extra = {
        "kvc_tiers": ["CPUMemory", "LocalNVMe"],
        "chunk_size": 2 * BLOCK_TOKENS,
        "instance_id": "real",
        "events": {"endpoint": "tcp://127.0.0.1:0", "heartbeat_seconds": 0.2},
        "CPUMemory": {"capacity_GB": f"{20 * BLOCK_BYTES}B"},
        "LocalNVMe": {"capacity_GB": "64MiB", "path": str(tmp_path), "admission": "always"},
    }
    names = Names()
    with running_engine(
        model=ensure_tiny_llama(),
        kv_transfer_config=opal(extra),
        num_gpu_blocks_override=DEVICE_BLOCKS,
        max_model_len=1024,
    ) as engine:
        ports = engine.call("channel")
        addresses = [f"tcp://127.0.0.1:{ports[name]}" for name in ("endpoint", "publish_endpoint")]
        with Listener(ask=addresses[0], listen=addresses[1]) as listener:
            for wave in range(6):
                asked = requests_of(wave)
                for one, answer in zip(asked, engine.generate(asked), strict=True):
                    names.learn([*one["tokens"], *answer["tokens"]], one.get("salt"))
                if wave in (2, 4):
                    engine.reset_device()
                    engine.call("settle")
                if wave == 3:
                    assert engine.call("reset_tiers")
                    engine.call("settle")
                expected = contents(engine, names)
                wait_until(
                    lambda now=expected: listener.replayed() == now,  # type: ignore[misc]
                    "the contents",
                )
                for _, tier in expected:
                    assert blocks_in(listener.contents(tier)) == expected[0, tier]
            assert len(expected[0, "Device"]) > DEVICE_BLOCKS // 2
            wait_until(lambda: not listener.beats[-1].system.queue_depth, "an idle engine's load")
            system = listener.beats[-1].system
            assert system.queue_depth == system.running == system.waiting == 0
            assert system.prefill_tokens_per_second is not None
            assert all(tier.store_seconds_per_byte for tier in system.tiers)
