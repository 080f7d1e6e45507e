"""Recorded requests, by the identities of their blocks, as token ids of the served model.

Two forms of JSON lines: requests (`timestamp`, `input_length`, `output_length`, `hash_ids`), and
sessions (`trace_id`, `requests` with `t`, `think_time` and the same lengths and ids).
"""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.workload import (
    Conversation,
    Turn,
    Vocabulary,
    Workload,
    WorkloadError,
)
from opal_connector.simulation import TraceError, TraceLine, content_lines, read_trace_lines

SESSION_TOKENS_PER_ID: Final = 64
_OUTPUT_TOKENS_MIN: Final = 1  # of an answer that was empty: no endpoint takes 0


class _SessionRequest(msgspec.Struct, frozen=True):
    input_length: int
    hash_ids: list[int]
    output_length: int = 0
    t: float = 0.0
    think_time: float = 0.0


class _Session(msgspec.Struct, frozen=True):
    requests: list[_SessionRequest]
    trace_id: str | int = ""


class TraceWorkload(Workload, frozen=True, kw_only=True):
    """The requests of a trace at its times; equal hash ids are equal tokens.

    What an id stands for depends on the seed alone. In the form of sessions, a turn follows the
    answer to the one before, after its `think_time`.
    """

    kind: ClassVar[str] = "trace"

    trace_file: Path
    chunk_size: Annotated[
        int | None,
        Meta(description="Tokens of a hash id.  [default: what fits; 64 in sessions]"),
    ] = None
    multiplier_to_sec: Annotated[
        float,
        Meta(description="Seconds of a timestamp's unit; 0 sends as fast as it is allowed."),
    ] = 0.001
    inter_turn_multiplier: Annotated[
        float, Meta(description="Stretches the think time of sessions, which is in seconds.")
    ] = 1.0
    total_requests: Annotated[
        int | None, Meta(description="Requests, or sessions, of the file.  [default: all]")
    ] = None
    time_duration_sec: Annotated[
        float | None, Meta(description="No request of the file begins later.  [default: no limit]")
    ] = None
    input_length_max: Annotated[
        int | None, Meta(description="Leave longer prompts out.  [default: none]")
    ] = None
    output_length_max: Annotated[
        int | None, Meta(description="Cut longer answers.  [default: none]")
    ] = None
    max_outstanding_requests: Annotated[
        int | None, Meta(description="Requests under way at once.  [default: no limit]")
    ] = None
    max_concurrent_sessions: Annotated[int, Meta(description="Sessions under way at once.")] = 10

    def __post_init__(self) -> None:
        self.check_at_least(1, "chunk_size", "total_requests", "output_length_max")
        self.check_at_least(1, "max_outstanding_requests", "max_concurrent_sessions")
        self.check_at_least(1, "input_length_max")
        self.check_at_least(0, "multiplier_to_sec", "inter_turn_multiplier", "time_duration_sec")

    @property
    @override
    def request_count(self) -> int | None:
        if self.time_duration_sec is not None:
            return None
        if self._has_sessions():
            lengths = [
                one.input_length for found in self._read_sessions() for one in found.requests
            ]
        else:
            lengths = [line.input_length for line in self._read_requests()[1]]
        return sum(not self._is_too_long(length) for length in lengths)

    @property
    @override
    def requests_at_once(self) -> int | None:
        return self.max_outstanding_requests

    @property
    @override
    def conversations_at_once(self) -> int | None:
        return self.max_concurrent_sessions if self._has_sessions() else None

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """A request, or a session, each.

        Raises:
            TraceError: A line is not what it should be.
            WorkloadError: Nothing is left of the file.
        """
        is_empty = True
        make = self._sessions if self._has_sessions() else self._requests
        for conversation in make(vocabulary):
            is_empty = False
            yield conversation
        if is_empty:
            raise WorkloadError(f"trace_file: nothing of {self.trace_file.name} is within limits")

    def _requests(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        tokens_per_id, lines = self._read_requests()
        first = lines[0].timestamp
        for number, line in enumerate(lines):
            start_seconds = (line.timestamp - first) * self.multiplier_to_sec
            if self.time_duration_sec is not None and start_seconds > self.time_duration_sec:
                return
            if self._is_too_long(line.input_length):
                continue
            turn = self._turn(vocabulary, line, tokens_per_id, number)
            yield Conversation(f"request-{number}", [turn], start_seconds=start_seconds)

    def _sessions(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        sessions = self._read_sessions()
        firsts = [session.requests[0].t for session in sessions]
        order = sorted(range(len(sessions)), key=lambda place: firsts[place])
        for place in order:
            start_seconds = (firsts[place] - firsts[order[0]]) * self.multiplier_to_sec
            if self.time_duration_sec is not None and start_seconds > self.time_duration_sec:
                return
            wanted = [
                (number, request)
                for number, request in enumerate(sessions[place].requests)
                if not self._is_too_long(request.input_length)
            ]
            if wanted:
                name = f"{sessions[place].trace_id or 'session'}-{place}"
                turns = self._session_turns(vocabulary, place, wanted)
                yield Conversation(name, turns, len(wanted), start_seconds)

    def _session_turns(
        self, vocabulary: Vocabulary, place: int, wanted: Sequence[tuple[int, _SessionRequest]]
    ) -> Iterator[Turn]:
        tokens_per_id = self.chunk_size or SESSION_TOKENS_PER_ID
        for position, (number, request) in enumerate(wanted):
            delay = request.think_time * self.inter_turn_multiplier if position else 0.0
            yield self._turn(vocabulary, request, tokens_per_id, place, number, delay=delay)

    def _turn(
        self,
        vocabulary: Vocabulary,
        request: TraceLine | _SessionRequest,
        tokens_per_id: int,
        *name: int,
        delay: float = 0.0,
    ) -> Turn:
        prompt = expand(
            vocabulary, self.seed, request.hash_ids, request.input_length, tokens_per_id, name
        )
        output_tokens = max(_OUTPUT_TOKENS_MIN, request.output_length)
        return Turn(
            output_tokens=min(output_tokens, self.output_length_max or output_tokens),
            token_ids=prompt,
            delay_seconds=delay,
        )

    def _is_too_long(self, input_length: int) -> bool:
        return self.input_length_max is not None and input_length > self.input_length_max

    def _read_requests(self) -> tuple[int, list[TraceLine]]:
        version = self.trace_file.stat().st_mtime_ns
        return _read_requests(self.trace_file, self.chunk_size, self.total_requests, version)

    def _read_sessions(self) -> list[_Session]:
        version = self.trace_file.stat().st_mtime_ns
        return _read_sessions(self.trace_file, self.total_requests, version)

    def _has_sessions(self) -> bool:
        first = next((line for line in content_lines(self.trace_file) if line.strip()), b"")
        return b'"requests"' in first and b'"timestamp"' not in first


def expand(
    vocabulary: Vocabulary,
    seed: int,
    hash_ids: Sequence[int],
    input_length: int,
    tokens_per_id: int,
    request: tuple[int, ...],
) -> list[int]:
    """The prompt of a request: the tokens of its ids, the last one cut.

    What no id covers, the tail that some traces leave out, belongs to the request alone.
    """
    prompt: list[int] = []
    for identity in hash_ids:
        size = min(tokens_per_id, input_length - len(prompt))
        if size <= 0:
            break
        prompt.extend(vocabulary.tokens(size, "hash id", seed, identity))
    rest = input_length - len(prompt)
    if rest > 0:
        prompt.extend(vocabulary.tokens(rest, "tail", seed, *request))
    return prompt


@functools.lru_cache(maxsize=1)
def _read_requests(
    path: Path,
    tokens_per_id: int | None,
    limit: int | None,
    _version: int,  # a file that has changed is read again
) -> tuple[int, list[TraceLine]]:
    block_tokens, lines, _ = read_trace_lines(path, tokens_per_id=tokens_per_id, limit=limit)
    return block_tokens, sorted(lines, key=lambda line: line.timestamp)


@functools.lru_cache(maxsize=1)
def _read_sessions(path: Path, limit: int | None, _version: int) -> list[_Session]:
    decoder = msgspec.json.Decoder(_Session)
    sessions: list[_Session] = []
    for number, text in enumerate(content_lines(path), 1):
        if not text.strip() or (limit is not None and len(sessions) >= limit):
            continue
        try:
            session = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        if any(request.input_length < 1 for request in session.requests):
            raise TraceError(f"line {number}, input_length: found 0 or less, at least 1")
        if session.requests:
            sessions.append(session)
    return sessions
