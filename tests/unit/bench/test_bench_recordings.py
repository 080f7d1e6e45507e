"""Recorded workloads: traces of hash ids, in requests or sessions, and gen_ai spans."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from opal_connector.cli.bench import OtelWorkload, TraceWorkload, Turn, Vocabulary
from opal_connector.cli.bench.traces import expand
from opal_connector.cli.bench.workload import WorkloadError
from opal_connector.simulation import TraceError


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(timestamp: float, ids: list[int], size: int, output: int = 5) -> dict[str, Any]:
    return {
        "timestamp": timestamp,
        "input_length": size,
        "output_length": output,
        "hash_ids": ids,
    }


def requests(workload: TraceWorkload) -> list[tuple[float, Turn]]:
    return [
        (one.start_seconds, turn)
        for one in workload.conversations(Vocabulary())
        for turn in one.turns
    ]


# Requests.


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three prompts of 16-token ids; the first two share two blocks. They are out of order."""
    return write(
        tmp_path / "trace.jsonl",
        [line(5000, [1, 2, 3], 40), line(3000, [1, 2, 4], 48, 0), line(9000, [7], 16, 300)],
    )


def test_equal_ids_are_equal_tokens_and_others_are_not(trace: Path) -> None:
    """A prefix cache finds exactly what the trace says is common."""
    found = [turn.token_ids for _, turn in requests(TraceWorkload(trace_file=trace))]

    assert [len(prompt) for prompt in found] == [48, 40, 16]
    assert found[0][:32] == found[1][:32]
    assert found[0][32:40] != found[1][32:]
    assert found[2] != found[0][:16]


def test_times_are_the_traces_from_its_first_request(trace: Path) -> None:
    """Timestamps are milliseconds unless something else is said."""
    seconds = [at for at, _ in requests(TraceWorkload(trace_file=trace))]
    faster = [at for at, _ in requests(TraceWorkload(trace_file=trace, multiplier_to_sec=0.0001))]
    at_once = [at for at, _ in requests(TraceWorkload(trace_file=trace, multiplier_to_sec=0))]

    assert seconds == pytest.approx([0, 2, 6])
    assert faster == pytest.approx([0, 0.2, 0.6])
    assert at_once == [0, 0, 0]


def test_limits_of_a_trace(trace: Path) -> None:
    """Number, time and lengths can be cut; the count for the progress follows."""
    first = TraceWorkload(trace_file=trace, total_requests=1)
    early = TraceWorkload(trace_file=trace, time_duration_sec=2.5)
    short = TraceWorkload(trace_file=trace, input_length_max=40, output_length_max=20)

    assert [len(turn.token_ids) for _, turn in requests(first)] == [40]
    assert [len(turn.token_ids) for _, turn in requests(early)] == [48, 40]
    assert [len(turn.token_ids) for _, turn in requests(short)] == [40, 16]
    assert [turn.output_tokens for _, turn in requests(short)] == [5, 20]
    assert (first.request_count, early.request_count, short.request_count) == (1, None, 2)


def test_answer_without_tokens_is_asked_for_one(trace: Path) -> None:
    """No endpoint takes a request for none."""
    assert requests(TraceWorkload(trace_file=trace))[0][1].output_tokens == 1


def test_compressed_trace_is_the_same(trace: Path, tmp_path: Path) -> None:
    """Traces are kept as they are downloaded."""
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))

    assert requests(TraceWorkload(trace_file=packed)) == requests(TraceWorkload(trace_file=trace))


def test_tail_without_an_id_is_the_requests_own() -> None:
    """Some traces name whole blocks only; what is behind them is shared with nobody."""
    one, other = (expand(Vocabulary(), 0, [1], 24, 16, (number,)) for number in range(2))

    assert len(one) == len(other) == 24
    assert one[:16] == other[:16]
    assert one[16:] != other[16:]


def test_chunk_size_of_one_is_opals_smallest_trace(tmp_path: Path) -> None:
    """An id may stand for a single token."""
    path = write(tmp_path / "hello.jsonl", [line(0, [5, 6, 7], 3), line(1, [5, 6, 8], 3)])

    one, other = (
        turn.token_ids for _, turn in requests(TraceWorkload(trace_file=path, chunk_size=1))
    )

    assert one[:2] == other[:2]


def test_bad_line_and_empty_rest_are_said(tmp_path: Path, trace: Path) -> None:
    """A trace that cannot be is refused with the line, and so is one of which nothing is left."""
    bad = write(tmp_path / "bad.jsonl", [line(0, [1], 40), {"timestamp": 1}])

    with pytest.raises(TraceError, match="line 2, input_length: missing"):
        requests(TraceWorkload(trace_file=bad))
    with pytest.raises(WorkloadError, match=r"nothing of trace\.jsonl is within limits"):
        requests(TraceWorkload(trace_file=trace, input_length_max=3))


def test_changed_file_is_read_again(trace: Path) -> None:
    """What was read is kept only as long as it is true."""
    workload = TraceWorkload(trace_file=trace)
    assert workload.request_count == 3

    write(trace, [line(0, [1], 16)])

    assert workload.request_count == 1
    assert len(requests(workload)) == 1


# Sessions of hash ids.


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    def turn(ids: list[int], t: float, think_time: float = 0.0) -> dict[str, Any]:
        return {
            "t": t,
            "think_time": think_time,
            "input_length": 64 * len(ids),
            "hash_ids": ids,
            "output_length": 4,
        }

    return write(
        tmp_path / "sessions.jsonl",
        [
            {"trace_id": "late", "requests": [turn([1, 9], 4000)]},
            {"trace_id": "early", "requests": [turn([1], 1000), turn([1, 2], 2000, 1.5)]},
        ],
    )


def test_session_keeps_the_order_and_the_pauses_of_its_turns(sessions: Path) -> None:
    """Sessions begin at their times, their turns after answers and pauses."""
    workload = TraceWorkload(trace_file=sessions, inter_turn_multiplier=2)

    found = [(one, list(one.turns)) for one in workload.conversations(Vocabulary())]

    assert [one.conversation_id for one, _ in found] == ["early-1", "late-0"]
    assert [one.start_seconds for one, _ in found] == [0, 3]
    assert [one.turn_count for one, _ in found] == [2, 1]
    early = found[0][1]
    assert [len(turn.token_ids) for turn in early] == [64, 128]
    assert early[1].token_ids[:64] == early[0].token_ids == found[1][1][0].token_ids[:64]
    assert [turn.delay_seconds for turn in early] == [0, 3]
    assert workload.request_count == 3
    assert workload.conversations_at_once == 10


def test_bad_session_is_said(tmp_path: Path) -> None:
    """The line and the field are named."""
    path = write(tmp_path / "bad.jsonl", [{"requests": [{"input_length": 3}]}])

    with pytest.raises(TraceError, match=r"line 1: .*hash_ids"):
        requests(TraceWorkload(trace_file=path))


# gen_ai spans.


def span(start: Any, end: Any, messages: Any, **attributes: Any) -> dict[str, Any]:
    return {
        "span_id": f"s{start}",
        "start_time": start,
        "end_time": end,
        "attributes": {"gen_ai.input.messages": messages, **attributes},
    }


def turns_of(path: Path, **more: Any) -> list[list[Turn]]:
    workload = OtelWorkload(trace_file=path, **more)
    return [list(one.turns) for one in workload.conversations(Vocabulary())]


def test_spans_are_turns_in_the_order_of_time(tmp_path: Path) -> None:
    """Spans lie in a file as they ended; what is no model call is no turn."""
    hello = [{"role": "user", "content": "hello"}]
    more = [*hello, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "why?"}]
    tool = {"start_time": 0, "end_time": 9, "attributes": {"gen_ai.tool.name": "search"}}
    path = write(
        tmp_path / "spans.jsonl",
        [
            {
                "trace_id": "a",
                "spans": [
                    span(12, 13, json.dumps(more), **{"gen_ai.usage.output_tokens": 7}),
                    tool,
                    span(10, 10.5, json.dumps(hello), **{"gen_ai.usage.completion_tokens": 3}),
                ],
            }
        ],
    )

    [[first, second]] = turns_of(path, inter_turn_multiplier=2)

    assert (first.messages, second.messages) == (hello, more)
    assert (first.output_tokens, second.output_tokens) == (3, 7)
    assert (first.delay_seconds, second.delay_seconds) == (0, 3.0)
    assert second.is_whole, "the record holds its own answers"
    assert OtelWorkload(trace_file=path).is_chat
    assert OtelWorkload(trace_file=path).request_count == 2


def test_messages_of_every_shape_become_role_and_text(tmp_path: Path) -> None:
    """Parts, texts, calls of tools and their answers, and instructions that stand apart."""
    messages = [
        {"role": "user", "parts": [{"type": "text", "content": "look"}, {"text": "here"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "name": "f", "arguments": {"x": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "response": "42"}]},
        {"role": "assistant", "content": None},
    ]
    system = json.dumps([{"type": "text", "content": "Be kind."}])
    path = write(
        tmp_path / "parts.jsonl",
        [{"spans": [span(1, 2, messages, **{"gen_ai.system_instructions": system})]}],
    )

    [[turn]] = turns_of(path)

    assert [one["role"] for one in turn.messages] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert turn.messages[0]["content"] == "Be kind."
    assert turn.messages[1]["content"] == "look\nhere"
    assert json.loads(turn.messages[2]["content"])["name"] == "f"
    assert "42" in turn.messages[3]["content"]
    assert turn.messages[4]["content"] == ""
    assert turn.output_tokens == 128


def test_wire_form_of_otlp_is_understood(tmp_path: Path) -> None:
    """Attributes as a list of typed values, and times in nanoseconds."""
    value = json.dumps([{"role": "user", "content": "hello"}])
    spans = [
        {
            "startTimeUnixNano": str(1_700_000_000_000_000_000 + number * 4_000_000_000),
            "endTimeUnixNano": str(1_700_000_001_000_000_000 + number * 4_000_000_000),
            "attributes": [
                {"key": "gen_ai.input.messages", "value": {"stringValue": value}},
                {"key": "gen_ai.usage.output_tokens", "value": {"intValue": "6"}},
            ],
        }
        for number in range(2)
    ]
    path = write(tmp_path / "otlp.jsonl", [{"trace_id": "a", "spans": spans}])

    [[first, second]] = turns_of(path)

    assert first.output_tokens == 6
    assert second.delay_seconds == pytest.approx(3.0, abs=1e-3)


def test_dates_are_times(tmp_path: Path) -> None:
    """ISO 8601, as Opal's own traces have it."""
    hello = [{"role": "user", "content": "hello"}]
    path = write(
        tmp_path / "dates.jsonl",
        [
            {
                "spans": [
                    span("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z", hello),
                    span("2026-01-01T00:00:03.500000+00:00", "2026-01-01T00:00:04Z", hello),
                ]
            }
        ],
    )

    assert turns_of(path)[0][1].delay_seconds == pytest.approx(2.5)
    assert turns_of(path, multiplier_to_sec=0)[0][1].delay_seconds == 0


def test_pretokenized_sessions_are_sent_as_they_are(tmp_path: Path) -> None:
    """Their ids are tokens of the model, and the endpoint is the one for tokens."""
    turns = [
        {"hash_ids": [5, 6], "output_length": 3, "start_time": 1, "end_time": 2},
        {"hash_ids": [5, 6, 7, 8], "output_token_ids": [1, 2], "start_time": 4, "end_time": 5},
    ]
    path = write(tmp_path / "tokens.jsonl", [{"trace_id": "a", "turns": turns}])

    [[first, second]] = turns_of(path)

    assert (first.token_ids, second.token_ids) == ([5, 6], [5, 6, 7, 8])
    assert (first.output_tokens, second.output_tokens) == (3, 2)
    assert second.delay_seconds == 2
    assert not OtelWorkload(trace_file=path).is_chat


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[1", "line 1: not a JSON object"),
        ('{"trace_id": 1}', "line 1: 'spans' is missing"),
        ('{"spans": [{"attributes": {}}]}', "no span in it has gen_ai.input.messages"),
        ('{"turns": [{"hash_ids": []}]}', "line 1: hash_ids: a turn without token ids"),
        ('{"turns": [{"hash_ids": ["a"]}]}', "line 1: Expected `int`"),
        ("7", "line 1: "),
        (
            '{"spans": [{"attributes": {"gen_ai.input.messages": []}}]}',
            "line 1: gen_ai.input.messages: no message in it",
        ),
        (
            '{"spans": [{"attributes": {"gen_ai.input.messages": [{"role": "user"}]}}]}',
            "line 1: 'start_time' is missing",
        ),
    ],
)
def test_record_that_is_none_is_said(tmp_path: Path, content: str, sentence: str) -> None:
    """Never a traceback for a file that somebody exported differently."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content + "\n")

    with pytest.raises(TraceError) as caught:
        turns_of(path)

    assert str(caught.value).startswith(sentence)
