"""Tokens to chunks: where chunks begin and end, and which hash names them."""

from collections.abc import Sequence

import msgspec

from opal_connector.keys.chain import CHAIN_ROOT, RequestIdentity, TokenChain


class ChunkSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens `[start_tokens, end_tokens)` of a sequence and the hashes that identify them."""

    start_tokens: int
    end_tokens: int
    chunk_hash: bytes
    parent_hash: bytes


class OpalTokenDatabase:
    """Turns token sequences into chains of chunk hashes.

    Stateless but for its settings; chains hold what grows. A chunk is `chunk_blocks` blocks of
    `block_tokens` tokens and is named by the hash of its last block.
    """

    def __init__(
        self, *, block_tokens: int, chunk_blocks: int, save_unfull_chunk: bool = True
    ) -> None:
        if block_tokens < 1 or chunk_blocks < 1:
            raise ValueError("block_tokens and chunk_blocks must be at least 1")
        self.block_tokens = block_tokens
        self.chunk_blocks = chunk_blocks
        self.save_unfull_chunk = save_unfull_chunk

    def chain(self, identity: RequestIdentity | None = None) -> TokenChain:
        """An empty chain for one request."""
        return TokenChain(identity or RequestIdentity(), self.block_tokens)

    def process_tokens(
        self, tokens: Sequence[int], identity: RequestIdentity | None = None
    ) -> list[ChunkSpan]:
        """The chunks of a whole sequence, the unfull tail in whole blocks last if it is kept."""
        chain = self.chain(identity)
        chain.extend(tokens)
        return self.spans(chain)

    def spans(self, chain: TokenChain) -> list[ChunkSpan]:
        """The chunks that a chain holds now."""
        hashes = chain.hashes
        spans: list[ChunkSpan] = []
        for first in range(0, len(hashes), self.chunk_blocks):
            stop = min(first + self.chunk_blocks, len(hashes))
            if stop - first < self.chunk_blocks and not self.save_unfull_chunk:
                break
            spans.append(
                ChunkSpan(
                    start_tokens=first * self.block_tokens,
                    end_tokens=stop * self.block_tokens,
                    chunk_hash=hashes[stop - 1],
                    parent_hash=hashes[first - 1] if first else CHAIN_ROOT,
                )
            )
        return spans
