"""I2 in vLLM's own terms: BlockStored and BlockRemoved replay to exactly what can be had."""

import struct
from collections.abc import Sequence
from hashlib import sha256

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("vllm")
from book_machine import BookMachine
from fakes import BLOCK_TOKENS
from hypothesis import settings
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

from opal_connector.events import KVCEvent
from opal_connector.integrations.vllm.kv_events import external_hash, host_events
from opal_connector.keys import CHAIN_ROOT
from opal_connector.keys.attention import plain_layout

pytestmark = pytest.mark.vllm


class BlockEventMachine(BookMachine):
    """Replays the host's events beside Opal's own.

    Mutable state: the blocks that the host's stream says are there, and what their names stand for.
    """

    announced: set[ExternalBlockHash]
    digests: dict[ExternalBlockHash, bytes]

    def on_events(self, events: Sequence[KVCEvent]) -> None:
        """Every block is announced once and withdrawn once, and the stream is the contents."""
        if not hasattr(self, "announced"):
            self.announced, self.digests = set(), {}
        for event in host_events(events, plain_layout(BLOCK_TOKENS)):
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.medium == MEDIUM_CPU
            assert event.block_hashes, "an event about nothing"
            blocks = set(event.block_hashes)
            assert len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not blocks & self.announced, "stored twice"
                self.announced |= blocks
                self.check_chain(event)
            else:
                assert blocks <= self.announced, "removed before it was stored"
                self.announced -= blocks
        assert self.announced == set(map(external_hash, self.contents.blocks()))

    def check_chain(self, event: BlockStored) -> None:
        """A consumer that hashes parent and tokens itself comes to the same blocks."""
        parent = CHAIN_ROOT
        if event.parent_block_hash is not None:
            parent = self.digests[event.parent_block_hash]
        assert len(event.token_ids) == len(event.block_hashes) * BLOCK_TOKENS
        for place, block in enumerate(event.block_hashes):
            tokens = event.token_ids[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
            parent = sha256(parent + struct.pack(f"<{BLOCK_TOKENS}I", *tokens)).digest()
            assert external_hash(parent) == block
            self.digests[block] = parent


TestBlockEvents = BlockEventMachine.TestCase
TestBlockEvents.settings = settings(max_examples=2 * settings().max_examples)
