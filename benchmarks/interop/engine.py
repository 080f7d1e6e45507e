"""A real Opal engine with small tiers, and where its blocks are according to its own events.

The device forgets by pressure, never by a reset: a reset is announced as "all blocks cleared",
which names no tier, and routers drop the other tiers on it.
"""

import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import httpx
import msgspec
import zmq

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.cli.progress import Reporter
from opal_connector.cli.server_process import ServerPlan, free_port, opal_transfer_config, serve

BLOCK_TOKENS: Final = 32
PROMPT_BLOCKS: Final = 8
DEVICE_BLOCKS: Final = 41  # one of them is vLLM's null block
MEMORY_BLOCKS: Final = 120
BLOCK_BYTES: Final = 32 << 10  # of the tiny model: 1 KiB per token
CHUNK_BLOCKS: Final = 2
MODEL_NAME: Final = "model"
_QUIET_SECONDS: Final = 1.0
_END_MARK: Final = (-1).to_bytes(8, "big", signed=True)
_TOKENS: Final = range(32, 127)  # the printable bytes, which are the model's tokens

Tier = str
_TIERS: Final = {"GPU": "Device", "CPU": "CPUMemory", "STORAGE": "LocalNVMe"}


@dataclass(frozen=True)
class Engine:
    """Where the server and its two event sockets are."""

    url: str
    events: str
    replay: str
    model: Path

    def complete(self, tokens: Sequence[int], max_tokens: int = 1) -> dict[str, Any]:
        """A completion by the engine itself, or by a router with the same interface."""
        return complete(self.url, tokens, max_tokens)


def complete(url: str, tokens: Sequence[int], max_tokens: int = 1) -> dict[str, Any]:
    """The answer to a prompt of token ids."""
    body = {
        "model": MODEL_NAME,
        "prompt": list(tokens),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    # Proxies of the environment are for other hosts than this one.
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def prompt(number: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    """Whole blocks and one token more, so that all of the blocks may be used again."""
    choose = random.Random(number)
    return [choose.choice(_TOKENS) for _ in range(blocks * BLOCK_TOKENS + 1)]


@contextlib.contextmanager
def running_engine(directory: Path, reporter: Reporter, last_tier: Tier) -> Iterator[Engine]:
    """An engine whose device holds five prompts, its memory fifteen, and its last tier all."""
    events, replay = free_port(), free_port()
    model = ensure_tiny_llama()
    stream = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    tiers = {
        "kvc_tiers": ["CPUMemory", last_tier],
        "chunk_size": CHUNK_BLOCKS * BLOCK_TOKENS,
        "CPUMemory": {"capacity_GB": f"{MEMORY_BLOCKS * BLOCK_BYTES}B"},
        last_tier: {
            "path": str(directory / "files"),
            "capacity_GB": "256MiB",
            "write": "demote",
            "admission": "always",
        },
    }
    plan = ServerPlan(
        model,
        directory / "engine.log",
        opal_transfer_config(tiers),
        (
            *("--served-model-name", MODEL_NAME, "--block-size", str(BLOCK_TOKENS)),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"),
            *("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-num-seqs", "2"),
            *("--kv-events-config", msgspec.json.encode(stream).decode()),
            "--enable-prompt-tokens-details",
        ),
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    with serve(plan, reporter) as server:
        yield Engine(server.url, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}", model)


class Contents:
    """Which blocks are in which tier, by replaying the engine's stream from its beginning.

    Blocks are named by the tokens of their whole prefix, which is what routers go by. Used by one
    thread. `last_sequence` is the last batch.
    """

    def __init__(self, engine: Engine) -> None:
        context = zmq.Context.instance()
        self._live = context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(engine.events)
        self._prefixes: dict[int | bytes, tuple[int, ...]] = {}
        self._held: dict[Tier, set[tuple[int, ...]]] = {}
        self.last_sequence = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.close(linger=0)

    def settle(self) -> None:
        """Read on until nothing has come for a while."""
        quiet_until = time.monotonic() + _QUIET_SECONDS
        while time.monotonic() < quiet_until:
            if self._live.poll(50):
                _, number, payload = self._live.recv_multipart()
                self.last_sequence = int.from_bytes(number, "big")
                _, events, *_ = msgspec.msgpack.decode(payload)
                for event in events:
                    self._apply(event)
                quiet_until = time.monotonic() + _QUIET_SECONDS

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            raise RuntimeError("the device was reset, which routers take for all tiers")
        tier = event.get("ownership") or _TIERS[event["medium"]]
        held = self._held.setdefault(tier, set())
        if kind == "BlockRemoved":
            held.difference_update(self._prefixes[name] for name in event["block_hashes"])
            return
        tokens = event["token_ids"]
        parent = event["parent_block_hash"]
        prefix = self._prefixes[parent] if parent is not None else ()
        for place, name in enumerate(event["block_hashes"]):
            prefix += tuple(tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
            self._prefixes[name] = prefix
            held.add(prefix)

    def runs(self, tokens: Sequence[int]) -> dict[Tier, int]:
        """The prompt's blocks from its beginning, each counted in the fastest tier that has it."""
        counts = {"Device": 0, "CPUMemory": 0, "LocalNVMe": 0, "DistributedFS": 0}
        for end in range(BLOCK_TOKENS, len(tokens), BLOCK_TOKENS):
            prefix = tuple(tokens[:end])
            tier = next((tier for tier in counts if prefix in self._held.get(tier, ())), None)
            if tier is None:
                break
            counts[tier] += 1
        return counts
