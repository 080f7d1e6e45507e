"""Traces: what a file says, which blocks that makes, and what is said of a bad line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from opal_connector.simulation import TraceError, generated_chats, read_trace


def line(ids: list[int], *, tokens: int, **others: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids, **others}


def write(path: Path, *lines: Any) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_ids_behind_different_prefixes_are_different_blocks(tmp_path: Path) -> None:
    """Traces that name contents (Bailian's) are chained by position; equal prefixes stay equal."""
    trace = read_trace(
        write(
            tmp_path / "t",
            line([1, 2, 3], tokens=48, chat_id=7, parent_chat_id=-1, type="text", turn=1),
            line([1, 2, 4], tokens=48),
            line([9, 2, 3], tokens=48),
        ),
        tokens_per_id=16,
    )

    first, second, third = (request.hashes for request in trace.requests)

    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert not set(first) & set(third)


def test_hashes_are_the_same_in_every_process(tmp_path: Path) -> None:
    """The chain depends on the ids alone: never on Python's salted hash()."""
    trace = read_trace(write(tmp_path / "t", line([5, 6], tokens=32)), tokens_per_id=16)

    assert [block.hex()[:16] for block in trace.requests[0].hashes] == [
        "ef09cd74df690bc8",
        "f494e30e25bcaf41",
    ]


def test_unfull_last_id_is_no_block_and_one_token_is_computed(tmp_path: Path) -> None:
    """Only whole blocks are stored, and a whole prompt never comes from a cache, as in vLLM."""
    trace = read_trace(
        write(tmp_path / "t", line([1, 2, 3], tokens=40), line([1, 2], tokens=32)),
        tokens_per_id=16,
    )

    assert [len(request.hashes) for request in trace.requests] == [2, 2]
    assert [trace.usable_blocks(request) for request in trace.requests] == [2, 1]


def test_tokens_per_id_are_found_out(tmp_path: Path) -> None:
    """Nobody has to know how a trace was cut, if one size fits every line."""
    whole_ids_only = line([1, 2], tokens=70)

    assert read_trace(write(tmp_path / "a", line([1, 2, 3], tokens=1100))).block_tokens == 512
    assert read_trace(write(tmp_path / "b", line([1, 2, 3], tokens=70))).block_tokens == 32
    assert read_trace(write(tmp_path / "c", whole_ids_only)).block_tokens == 32


def test_gzip_is_recognised_by_its_content(tmp_path: Path) -> None:
    """A compressed trace reads the same, whatever its name."""
    plain = write(tmp_path / "plain", line([1, 2], tokens=32))
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(plain.read_bytes()))

    assert read_trace(packed, tokens_per_id=16) == read_trace(plain, tokens_per_id=16)


def test_requests_come_by_time_in_the_unit_of_the_trace(tmp_path: Path) -> None:
    """Timestamps count milliseconds unless the caller knows better; the order is theirs."""
    late = line([1], tokens=16, timestamp=2000)
    early = line([2], tokens=17, timestamp=-500)

    trace = read_trace(write(tmp_path / "t", late, early), tokens_per_id=16)

    assert [request.arrival_seconds for request in trace.requests] == [-0.5, 2.0]
    assert [request.input_tokens for request in trace.requests] == [17, 16]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", r"line 2: not a JSON object"),
        ("[]", r"line 2, the whole: expected `object`, got `array`"),
        ("null", r"line 2, the whole: expected `object`, got `null`"),
        ('{"input_length": 16, "hash_ids": [1]}', r"line 2, timestamp: missing"),
        (line(["a"], tokens=16), r"line 2, hash_ids\[0\]: expected `int`, got `str`"),  # type: ignore[list-item]
        (line([1], tokens="16"), r"line 2, input_length: expected `int`, got `str`"),  # type: ignore[arg-type]
        (line([], tokens=-1), r"line 2, input_length: found -1, below 0"),
        (
            line([1], tokens=0),
            r"line 2, hash_ids: 1 ids of 16 tokens do not make an input_length of 0",
        ),
        (line([1], tokens=16, output_length=-1), r"line 2, output_length: found -1, below 0"),
        (
            line([1, 2, 3], tokens=16),
            r"line 2, hash_ids: 3 ids of 16 tokens do not make an input_length of 16",
        ),
    ],
)
def test_bad_line_is_named_with_its_field(tmp_path: Path, bad: Any, message: str) -> None:
    """A person finds the mistake without reading the file."""
    path = write(tmp_path / "t", line([1], tokens=16), bad)

    with pytest.raises(TraceError, match=message):
        read_trace(path, tokens_per_id=16)


def test_lines_that_no_size_fits_are_named_too(tmp_path: Path) -> None:
    """Finding out the tokens per id says which line contradicts the others."""
    path = write(tmp_path / "t", line([1, 2], tokens=32), line([1, 2], tokens=320))

    with pytest.raises(TraceError, match=r"line 2, hash_ids: 2 ids of 16 tokens"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"")])
def test_trace_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    """Nothing can be said about nothing."""
    (tmp_path / "t").write_bytes(content)

    with pytest.raises(TraceError, match="no request"):
        read_trace(tmp_path / "t")


def test_torn_gzip_is_refused(tmp_path: Path) -> None:
    """Half a download is not half a trace."""
    packed = gzip.compress(json.dumps(line([1], tokens=16)).encode())
    (tmp_path / "t").write_bytes(packed[: len(packed) // 2])

    with pytest.raises(TraceError, match="not whole"):
        read_trace(tmp_path / "t")


def test_limit_reads_no_further(tmp_path: Path) -> None:
    """What comes after the last wanted request may be anything."""
    path = write(tmp_path / "t", line([1], tokens=16), "{")

    assert len(read_trace(path, tokens_per_id=16, limit=1).requests) == 1


def test_generated_trace_depends_on_its_seed_only() -> None:
    """Benchmarks without recorded traces measure the same thing every time."""
    one = generated_chats(7, 50, turn_chance=0.5, chats_kept=5)

    assert generated_chats(7, 50, turn_chance=0.5, chats_kept=5) == one
    assert generated_chats(8, 50, turn_chance=0.5, chats_kept=5) != one


def test_a_request_without_a_prompt_is_left_out(tmp_path: Path) -> None:
    """Recordings have them where a call failed: nothing of them could be cached."""
    path = write(tmp_path / "t", line([1], tokens=16), line([], tokens=0), line([1, 2], tokens=32))

    trace = read_trace(path, tokens_per_id=16)

    assert [request.input_tokens for request in trace.requests] == [16, 32]
    assert trace.left_out == 1
