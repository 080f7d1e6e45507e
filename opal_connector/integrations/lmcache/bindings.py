"""What LMCache's chunks are called in Opal's chain, where it is known what tokens they are."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from opal_connector.keys import CHAIN_ROOT, RequestIdentity, canonical_extras, packed_tokens

MOST_CHUNKS: Final = 65_536


class Link(NamedTuple):
    """A chunk's digest in Opal's chain, and that of the chunk before it."""

    parent: bytes
    digest: bytes


class TokenBindings:
    """The tokens that recent chunks stand for, and the digests that follow from them.

    One chunk is one block of the chain. LMCache's own hash says nothing of the tenant, Opal's chain
    does: so digests are by chunk and `cache_salt`.

    Mutable state: tokens by chunk and digests by (chunk, salt), both bounded, what was used
    longest ago is forgotten; guarded by the lock of `PlacementBooks`.
    """

    def __init__(self, chunk_tokens: int, most_chunks: int = MOST_CHUNKS) -> None:
        self._chunk_tokens = chunk_tokens
        self._most_chunks = most_chunks
        self._chunks: OrderedDict[bytes, tuple[bytes | None, bytes]] = OrderedDict()
        self._links: OrderedDict[tuple[bytes, str], Link] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk_hash: bytes) -> bool:
        return chunk_hash in self._chunks

    def bind(self, chunk_hash: bytes, parent_hash: bytes | None, tokens: Sequence[int]) -> bool:
        """Take note of a chunk's tokens; returns whether they can be used.

        Args:
            chunk_hash: LMCache's name of the chunk.
            parent_hash: That of the chunk before it; None for the first of a sequence.
            tokens: Exactly one chunk of them.
        """
        if len(tokens) != self._chunk_tokens:
            return False
        try:
            packed = packed_tokens(tokens)
        except (OverflowError, TypeError):  # a number that no engine takes for a token
            return False
        self._chunks[chunk_hash] = parent_hash, packed
        self._chunks.move_to_end(chunk_hash)
        if len(self._chunks) > self._most_chunks:
            self._chunks.popitem(last=False)
        return True

    def link(self, chunk_hash: bytes, cache_salt: str) -> Link | bytes:
        """The chunk's place in the chain; else the chunk whose tokens would have to be known."""
        path: list[tuple[bytes, bytes]] = []
        current: bytes | None = chunk_hash
        parent = CHAIN_ROOT
        while current is not None:
            known = self._links.get((current, cache_salt))
            if known is not None:
                self._links.move_to_end((current, cache_salt))
                parent = known.digest
                break
            bound = self._chunks.get(current)
            if bound is None or len(path) > len(self._chunks):  # or it bites its own tail
                return current
            path.append((current, bound[1]))
            current = bound[0]
        if not path:
            return known if known is not None else chunk_hash
        is_first = current is None
        for name, tokens in reversed(path):
            extras = self._extras(cache_salt) if is_first else b""
            link = Link(parent, sha256(parent + tokens + extras).digest())
            self._remember(name, cache_salt, link)
            parent, is_first = link.digest, False
        return link

    def _extras(self, cache_salt: str) -> bytes:
        identity = RequestIdentity(cache_salt=cache_salt or None)
        return canonical_extras(identity, block_index=0, block_tokens=self._chunk_tokens)

    def _remember(self, chunk_hash: bytes, cache_salt: str, link: Link) -> None:
        self._links[chunk_hash, cache_salt] = link
        if len(self._links) > 2 * self._most_chunks:
            self._links.popitem(last=False)
