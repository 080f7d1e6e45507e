"""How much of a prompt an engine found in its cache, as its answer says at the end."""

import re
from collections import deque
from typing import Final

# Within a JSON string the quotes would be escaped, so this is never what a model wrote.
_CACHED: Final = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_STREAM_TAIL_BYTES: Final = 32 << 10
_WHOLE_TAIL_BYTES: Final = 1 << 20


class CachedTokens:
    """Keeps the end of an answer that passes by, and reads it when the answer is over.

    Mutable state: the last chunks.
    """

    def __init__(self, *, is_stream: bool) -> None:
        self._limit = _STREAM_TAIL_BYTES if is_stream else _WHOLE_TAIL_BYTES
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def see(self, chunk: bytes) -> None:
        """A part of the answer; nothing is copied."""
        chunks = self._chunks
        chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(chunks[0]) >= self._limit:
            self._size -= len(chunks.popleft())

    def found(self) -> int | None:
        """The tokens that were cached, None where the engine does not say."""
        tail = b"".join(self._chunks)[-self._limit :]
        said = _CACHED.findall(tail)
        return int(said[-1]) if said else None
