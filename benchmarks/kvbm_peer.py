"""Dynamo's RadixTree as the peer of `kvbm.py`: how it is fed, and how it is kept from sleeping."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

# Before the peer is loaded: it writes a line for every removal that it refuses.
os.environ.setdefault("DYN_LOG", "off")

try:
    from dynamo._core import RadixTree
except ImportError:
    RadixTree = None


def short(block_hash: bytes) -> int:
    """The peer's name of a block."""
    return int.from_bytes(block_hash[:8], "little")


@contextlib.contextmanager
def kept_awake() -> Iterator[None]:
    """No core falls asleep meanwhile.

    The peer answers from a thread of its own. On a machine with nothing else to do most of its time
    is the waking of a core for it, up to ten times as much as the answer takes; a router's machine
    is not idle. A process of the lowest priority stays runnable, and gives way to both.
    """
    spin = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        spin.kill()
        spin.wait()


class Peer:
    """Dynamo's tree, fed as its users feed it."""

    def __init__(self) -> None:
        self.tree = RadixTree()
        self._events = 0

    def encoded(self, data: dict[str, Any]) -> bytes:
        self._events += 1
        event = {"event_id": self._events, "data": data, "dp_rank": 0}
        return json.dumps(event, separators=(",", ":")).encode()

    def stored(self, hashes: Sequence[bytes], parent_hash: bytes | None = None) -> bytes:
        names = [short(block_hash) for block_hash in hashes]
        return self.encoded(
            {
                "stored": {
                    "parent_hash": None if parent_hash is None else short(parent_hash),
                    "start_position": None,
                    "blocks": [{"block_hash": name, "tokens_hash": name} for name in names],
                }
            }
        )

    def removed(self, hashes: Sequence[bytes]) -> bytes:
        return self.encoded({"removed": {"block_hashes": [short(found) for found in hashes]}})

    def apply(self, worker: int, event: bytes) -> None:
        self.tree.apply_event(worker, event)

    def apply_if_it_can(self, worker: int, event: bytes) -> None:
        try:
            self.tree.apply_event(worker, event)
        except RuntimeError:
            return
