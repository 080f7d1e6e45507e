"""An engine that publishes vLLM's own events, without vLLM."""

import random
from collections import deque
from hashlib import sha256
from typing import Any

import msgspec

from opal_connector.events import DEVICE_TIER
from opal_connector.keys import RequestIdentity, TokenChain

BLOCK_TOKENS = 4
NODES = 15  # a binary tree of blocks: node k follows node (k - 1) // 2
_pack = msgspec.msgpack.Encoder().encode


def tokens_of(node: int) -> list[int]:
    return [node + 1] * BLOCK_TOKENS


def parent_of(node: int) -> int | None:
    return (node - 1) // 2 if node else None


def digest_of_node(node: int) -> bytes:
    path: list[int] = []
    place: int | None = node
    while place is not None:
        path = tokens_of(place) + path
        place = parent_of(place)
    chain = TokenChain(RequestIdentity(), BLOCK_TOKENS)
    chain.extend(path)
    return chain.hashes[-1]


class SimulatedEngine:
    """Blocks on the device and in a host tier, and the batches that say so."""

    def __init__(self, *, buffered: int | None = None, rank: int = 0, as_maps: bool = True):
        self.buffered = buffered
        self.rank = rank
        self.as_maps = as_maps
        self.generation = 0
        self._start()

    def _start(self) -> None:
        self.device: set[int] = set()
        self.host: set[int] = set()
        self.described: set[int] = set()  # what this process has stored at any time
        self.sequence = -1
        self.pending: list[Any] = []
        self.log: deque[tuple[int, bytes]] = deque(maxlen=self.buffered)

    def hash_of(self, node: int) -> int:
        seed = b"%d/%d" % (self.generation, node)
        return int.from_bytes(sha256(seed).digest()[:8], "little")

    def store(self, node: int, medium: str = "GPU") -> None:
        held = self.device if medium == "GPU" else self.host
        parent = parent_of(node)
        if node in held or (parent is not None and parent not in self.described):
            return
        held.add(node)
        self.described.add(node)
        parent_hash = None if parent is None else self.hash_of(parent)
        fields: dict[str, Any] = {
            "block_hashes": [self.hash_of(node)],
            "parent_block_hash": parent_hash,
            "token_ids": tokens_of(node),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": medium,
        }
        self._say("BlockStored", fields)

    def remove(self, node: int, medium: str = "GPU") -> None:
        held = self.device if medium == "GPU" else self.host
        if node in held:
            held.discard(node)
            fields = {"block_hashes": [self.hash_of(node)], "medium": medium}
            self._say("BlockRemoved", fields)

    def clear(self) -> None:
        self.device.clear()
        self._say("AllBlocksCleared", {})

    def remove_everything(self) -> None:
        for node in range(NODES):
            self.remove(node)
            self.remove(node, "CPU")

    def restart(self) -> None:
        self.generation += 1
        self._start()

    def flush(self, size: int = 100) -> list[tuple[int, bytes]]:
        out = []
        while self.pending:
            events, self.pending = self.pending[:size], self.pending[size:]
            self.sequence += 1
            stamp = self.generation * 1e6 + self.sequence
            message = (self.sequence, _pack([stamp, events, self.rank]))
            self.log.append(message)
            out.append(message)
        return out

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        return [message for message in self.log if message[0] >= first]

    def blocks(self) -> dict[tuple[int, str], set[bytes]]:
        held = {(0, DEVICE_TIER): self.device, (0, "CPU"): self.host}
        return {key: {digest_of_node(n) for n in nodes} for key, nodes in held.items() if nodes}

    def live(self, generator: random.Random, steps: int) -> None:
        """Do this and that."""
        for _ in range(steps):
            node = generator.randrange(NODES)
            medium = generator.choice(["GPU", "GPU", "CPU"])
            if generator.random() < 0.6:
                self.store(node, medium)
            else:
                self.remove(node, medium)

    def _say(self, kind: str, fields: dict[str, Any]) -> None:
        self.pending.append({"type": kind, **fields} if self.as_maps else [kind, *fields.values()])
