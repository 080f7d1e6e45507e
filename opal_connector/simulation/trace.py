"""Traces of requests: JSON lines of block identities, read into chains of hashes.

A line is `{"timestamp", "input_length", "output_length", "hash_ids"}`; other fields are ignored.
An id stands for a fixed number of tokens, and for what precedes it as far as its chain goes: where
ids name contents only, equal contents behind different prefixes part here.
"""

import gzip
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

from opal_connector.keys import CHAIN_ROOT

# In the order in which they are tried: a short trace may fit several.
LIKELY_TOKENS_PER_ID: Final = (512, 16, 32, 64, 128, 256, 1024, 2048)
_GZIP_MAGIC: Final = b"\x1f\x8b"


class TraceError(ValueError):
    """What is wrong with a trace, with the line and the field where it is."""


class TraceLine(msgspec.Struct, frozen=True, gc=False):
    """One request as it is written."""

    timestamp: float
    input_length: int
    hash_ids: list[int]
    output_length: int = 0


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request: when it comes, and the hash of every whole block of its prompt."""

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    hashes: list[bytes]


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival, of blocks of so many tokens.

    `left_out` counts requests without a prompt, as recordings have them of calls that failed.
    """

    block_tokens: int
    requests: list[TraceRequest]
    left_out: int = 0

    @property
    def input_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.input_tokens for request in self.requests)

    def unique_chunks(self, chunk_blocks: int) -> int:
        """How many different chunks of so many blocks the prompts have, unfull tails included."""
        keys: set[bytes] = set()
        for request in self.requests:
            keys.update(request.hashes[chunk_blocks - 1 :: chunk_blocks])
            keys.update(request.hashes[-1:])
        return len(keys)

    def usable_blocks(self, request: TraceRequest) -> int:
        """Blocks that a cache can bring: at least one token is left to compute."""
        return min(len(request.hashes), (request.input_tokens - 1) // self.block_tokens)


def read_trace(
    path: Path,
    *,
    tokens_per_id: int | None = None,
    seconds_per_unit: float = 0.001,
    limit: int | None = None,
) -> Trace:
    """The first `limit` requests of a file of JSON lines, compressed with gzip or not.

    Args:
        path: The file.
        tokens_per_id: Tokens that a hash id stands for; None finds out what fits all lines.
        seconds_per_unit: What a timestamp counts ("multiplier_to_sec").
        limit: Read no more requests than that.

    Raises:
        TraceError: A line is not what it should be, or there is none.
        OSError: The file cannot be read.
    """
    block_tokens, lines, left_out = read_trace_lines(path, tokens_per_id=tokens_per_id, limit=limit)
    known: dict[tuple[bytes, int], bytes] = {}
    requests = [
        TraceRequest(
            line.timestamp * seconds_per_unit,
            line.input_length,
            line.output_length,
            chain_hashes(line.hash_ids[: line.input_length // block_tokens], known),
        )
        for line in lines
    ]
    requests.sort(key=lambda request: request.arrival_seconds)
    return Trace(block_tokens, requests, left_out)


def read_trace_lines(
    path: Path, *, tokens_per_id: int | None = None, limit: int | None = None
) -> tuple[int, list[TraceLine], int]:
    """Tokens that a hash id stands for, and the first `limit` requests as they are written.

    Requests without a prompt are left out; their number comes last.

    Raises:
        TraceError: A line is not what it should be, or there is none.
        OSError: The file cannot be read.
    """
    lines, left_out = _decode(content_lines(path), limit)
    if not lines:
        raise TraceError("there is no request in it")
    block_tokens = tokens_per_id or _tokens_per_id(lines)
    for number, line in lines:
        _check_cover(number, line, block_tokens)
    return block_tokens, [line for _, line in lines], left_out


def chain_hashes(ids: Iterable[int], known: dict[tuple[bytes, int], bytes]) -> list[bytes]:
    """The hashes of a sequence of block identities, each over all that precede it.

    `known` remembers what was hashed before, so that equal hashes are the same object.
    """
    parent = CHAIN_ROOT
    hashes: list[bytes] = []
    for identity in ids:
        digest = known.get((parent, identity))
        if digest is None:
            digest = sha256(parent + b"%d" % identity).digest()
            known[parent, identity] = digest
        hashes.append(digest)
        parent = digest
    return hashes


def content_lines(path: Path) -> list[bytes]:
    """The lines of a file, compressed with gzip or not.

    Raises:
        TraceError: It is compressed and not whole.
        OSError: The file cannot be read.
    """
    content = path.read_bytes()
    if content.startswith(_GZIP_MAGIC):
        try:
            content = gzip.decompress(content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise TraceError(f"it is not whole: {error}") from None
    return content.splitlines()


def _decode(lines: Sequence[bytes], limit: int | None) -> tuple[list[tuple[int, TraceLine]], int]:
    decoder = msgspec.json.Decoder(TraceLine)
    decoded: list[tuple[int, TraceLine]] = []
    left_out = 0
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        if limit is not None and len(decoded) == limit:
            break
        try:
            line = decoder.decode(text)
        except msgspec.ValidationError as error:
            raise TraceError(f"line {number}, {_place(str(error))}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = str(error).removeprefix("JSON is malformed: ")
            raise TraceError(f"line {number}: not a JSON object ({reason})") from None
        if line.input_length < 0:
            raise TraceError(f"line {number}, input_length: found {line.input_length}, below 0")
        if line.output_length < 0:
            raise TraceError(f"line {number}, output_length: found {line.output_length}, below 0")
        if line.input_length == 0 and not line.hash_ids:
            left_out += 1
            continue
        decoded.append((number, line))
    return decoded, left_out


def _place(message: str) -> str:
    """The field first, then what is wrong with it."""
    text, _, path = message.partition(" - at ")
    if "missing required field" in text:
        return f"{text.split('`')[1]}: missing"
    field = path.strip("`").removeprefix("$").removeprefix(".")
    return f"{field or 'the whole'}: {text[0].lower()}{text[1:]}"


def _fits(line: TraceLine, tokens: int) -> bool:
    """Whether the ids are those of the whole blocks, with or without the last unfull one."""
    whole = line.input_length // tokens
    return whole <= len(line.hash_ids) <= -(-line.input_length // tokens)


def _tokens_per_id(lines: Sequence[tuple[int, TraceLine]]) -> int:
    for tokens in LIKELY_TOKENS_PER_ID:
        if all(_fits(line, tokens) for _, line in lines):
            return tokens
    # Say where the most plausible one fails.
    tokens = max(
        LIKELY_TOKENS_PER_ID, key=lambda tokens: sum(_fits(one, tokens) for _, one in lines)
    )
    for number, line in lines:
        _check_cover(number, line, tokens)
    raise AssertionError("unreachable: some line does not fit")


def _check_cover(number: int, line: TraceLine, tokens: int) -> None:
    if not _fits(line, tokens):
        raise TraceError(
            f"line {number}, hash_ids: {len(line.hash_ids)} ids of {tokens} tokens "
            f"do not make an input_length of {line.input_length}"
        )
