"""Sessions as OpenTelemetry's gen_ai spans record them, or the same with their token ids.

JSON lines: `{"trace_id", "spans": [{"start_time", "end_time", "attributes"}]}`, where the
attributes hold `gen_ai.input.messages`; or `{"trace_id", "turns": [{"hash_ids", ...}]}`, where
`hash_ids` are token ids of the served model.
"""

import functools
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta
from typing_extensions import override

from opal_connector.cli.bench.workload import Conversation, Message, Turn, Vocabulary, Workload
from opal_connector.simulation import TraceError, content_lines

_INPUT: Final = "gen_ai.input.messages"
_SYSTEM: Final = "gen_ai.system_instructions"
_OUTPUT_COUNTS: Final = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_NANOSECONDS_FROM: Final = 1e15  # as seconds, such a number would be past all calendars
_ROLES: Final = ("system", "user", "assistant")  # an answer of a tool would have to name its call
_VALUE_KINDS: Final = ("stringValue", "intValue", "doubleValue", "boolValue")


class _Recorded(msgspec.Struct, frozen=True):
    """One recorded turn: where it was in time, and what was asked."""

    start: float
    end: float
    output_tokens: int
    messages: list[Message] = []
    token_ids: list[int] = []


class OtelWorkload(Workload, frozen=True, kw_only=True):
    """Recorded sessions, each turn with its recorded prompt, after the answer to the one before.

    Sessions begin in the order of the file as soon as there is a place for them. Between turns
    passes what passed in the record.
    """

    kind: ClassVar[str] = "otel"

    trace_file: Path
    total_requests: Annotated[
        int | None, Meta(description="Sessions of the file.  [default: all]")
    ] = None
    max_concurrent_sessions: Annotated[int, Meta(description="Sessions under way at once.")] = 10
    multiplier_to_sec: Annotated[
        float, Meta(description="Stretches the recorded time; 0 has no pauses.")
    ] = 1.0
    inter_turn_multiplier: Annotated[
        float, Meta(description="Stretches the pauses between turns once more.")
    ] = 1.0
    output_tokens: Annotated[
        int, Meta(description="Tokens of an answer whose length was not recorded.")
    ] = 128
    output_length_max: Annotated[
        int | None, Meta(description="Cut longer answers.  [default: none]")
    ] = None
    max_outstanding_requests: Annotated[
        int | None, Meta(description="Requests under way at once.  [default: no limit]")
    ] = None

    def __post_init__(self) -> None:
        self.check_at_least(1, "total_requests", "max_concurrent_sessions", "output_tokens")
        self.check_at_least(1, "output_length_max", "max_outstanding_requests")
        self.check_at_least(0, "multiplier_to_sec", "inter_turn_multiplier")

    @property
    @override
    def is_chat(self) -> bool:
        return any(turn.messages for _, turns in self._sessions() for turn in turns)

    @property
    @override
    def request_count(self) -> int:
        return sum(len(turns) for _, turns in self._sessions())

    @property
    @override
    def requests_at_once(self) -> int | None:
        return self.max_outstanding_requests

    @property
    @override
    def conversations_at_once(self) -> int:
        return self.max_concurrent_sessions

    @override
    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One for every session.

        Raises:
            TraceError: A line is not what it should be, or there is none.
        """
        for number, (name, recorded) in enumerate(self._sessions()):
            turns = [self._turn(recorded, place) for place in range(len(recorded))]
            yield Conversation(f"{name or 'session'}-{number}", turns, len(turns))

    def _turn(self, recorded: list[_Recorded], place: int) -> Turn:
        turn = recorded[place]
        pause = turn.start - recorded[place - 1].end if place else 0.0
        output_tokens = turn.output_tokens or self.output_tokens
        return Turn(
            output_tokens=min(output_tokens, self.output_length_max or output_tokens),
            messages=turn.messages,
            token_ids=turn.token_ids,
            is_whole=True,
            delay_seconds=max(0.0, pause) * self.multiplier_to_sec * self.inter_turn_multiplier,
        )

    def _sessions(self) -> list[tuple[str, list[_Recorded]]]:
        return read_otel(self.trace_file, self.total_requests)


def read_otel(path: Path, limit: int | None) -> list[tuple[str, list[_Recorded]]]:
    """The sessions of a file: their names, and their turns in order.

    Raises:
        TraceError: A line is not what it should be, or there is none.
        OSError: The file cannot be read.
    """
    return _read_otel(path, limit, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _read_otel(
    path: Path,
    limit: int | None,
    _version: int,  # a file that has changed is read again
) -> list[tuple[str, list[_Recorded]]]:
    sessions: list[tuple[str, list[_Recorded]]] = []
    for number, text in enumerate(content_lines(path), 1):
        if not text.strip() or (limit is not None and len(sessions) >= limit):
            continue
        try:
            session = msgspec.json.decode(text)
            turns = _turns(session)
        except msgspec.ValidationError as error:
            raise TraceError(f"line {number}: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number}: not a JSON object ({error})") from None
        except KeyError as error:
            raise TraceError(f"line {number}: {error} is missing") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"line {number}: {error}") from None
        if turns:
            sessions.append((str(session.get("trace_id", "")), turns))
    if not sessions:
        raise TraceError(f"no span in it has {_INPUT}, and no turn token ids")
    return sessions


def _turns(session: dict[str, Any]) -> list[_Recorded]:
    if "turns" in session:
        turns = [_of_tokens(turn) for turn in session["turns"]]
    else:
        spans = [(span, _attributes(span)) for span in session["spans"]]
        turns = [_of_span(span, found) for span, found in spans if _INPUT in found]
    # Spans are recorded as they end, or in the order of a tree.
    return sorted(turns, key=lambda turn: turn.start)


def _of_tokens(turn: dict[str, Any]) -> _Recorded:
    token_ids = msgspec.convert(turn["hash_ids"], list[int])
    if not token_ids:
        raise ValueError("hash_ids: a turn without token ids")
    output = turn.get("output_length") or len(turn.get("output_token_ids") or ())
    start = _seconds(turn.get("start_time", 0.0))
    end = _seconds(turn.get("end_time", start))
    return _Recorded(start, end, int(output), token_ids=token_ids)


def _of_span(span: dict[str, Any], found: dict[str, Any]) -> _Recorded:
    messages = [_message(one) for one in _parsed(found[_INPUT])]
    if not messages:
        raise ValueError(f"{_INPUT}: no message in it")
    system = found.get(_SYSTEM)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _content(_parsed(system))})
    output = next((int(found[name]) for name in _OUTPUT_COUNTS if name in found), 0)
    start = _time(span, "start_time", "startTimeUnixNano")
    return _Recorded(start, _time(span, "end_time", "endTimeUnixNano"), output, messages)


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    """As a map; the wire form of OTLP has a list of keys and typed values."""
    attributes = span.get("attributes") or {}
    if isinstance(attributes, dict):
        return attributes
    return {one["key"]: _value(one["value"]) for one in attributes}


def _value(value: dict[str, Any]) -> Any:
    return next((value[kind] for kind in _VALUE_KINDS if kind in value), None)


def _parsed(value: Any) -> Any:
    """Attributes hold structures as JSON texts where a value may be a text only."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        return msgspec.json.decode(value)
    return value


def _message(message: dict[str, Any]) -> Message:
    """The message as every chat endpoint takes it: a role that all know, and a text."""
    content = message["content"] if "content" in message else message.get("parts", "")
    role = str(message["role"])
    return {"role": role if role in _ROLES else "user", "content": _content(content)}


def _content(content: Any) -> str:
    """The text of what may be a text, a part, or a list of them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_content(part) for part in content)
    if not isinstance(content, dict):
        return str(content)
    for field in ("content", "text"):
        if isinstance(content.get(field), str):
            return str(content[field])
    # A call of a tool, or its answer: what a template would spell out, as it was recorded.
    return msgspec.json.encode(content).decode()


def _time(span: dict[str, Any], *names: str) -> float:
    for name in names:
        if name in span:
            return _seconds(span[name])
    raise KeyError(names[0])


def _seconds(value: Any) -> float:
    """A time: seconds, nanoseconds, or a date as ISO 8601 has it."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return datetime.fromisoformat(value).timestamp()
    return value / 1e9 if value > _NANOSECONDS_FROM else float(value)
