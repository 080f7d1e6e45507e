"""Streamed answers as servers send them, in whatever pieces the network makes of them."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opal_connector.cli.bench.stream import StreamedAnswer, StreamError


def data(event: Any) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()


def choice(text: str, finish: str | None = None) -> bytes:
    return data({"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    return data({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


USAGE = data(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
)
DONE = b"data: [DONE]\n\n"
STREAM = choice("on") + choice("ce é") + choice("", "length") + USAGE + DONE


def read(*chunks: bytes) -> StreamedAnswer:
    """Chunks that come a second apart."""
    answer = StreamedAnswer()
    for number, chunk in enumerate(chunks):
        answer.feed(chunk, float(number))
    answer.end()
    return answer


@given(cuts=st.lists(st.integers(1, len(STREAM) - 1), max_size=8))
def test_cuts_of_the_network_change_nothing(cuts: list[int]) -> None:
    """A chunk may end anywhere, within a character too."""
    places = [0, *sorted(set(cuts)), len(STREAM)]
    chunks = [STREAM[start:end] for start, end in pairwise(places)]

    answer = read(*chunks)

    assert answer.text == "once é"
    assert len(answer.times) == 2
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, 3)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.finish_reason == "length"


def test_role_alone_is_no_token() -> None:
    """Many servers send it at once: it would make every time to first token a lie."""
    answer = read(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="yes"),
        delta(content=""),
        delta(finish="stop"),
        USAGE + DONE,
    )

    assert answer.times == [1.0, 2.0, 3.0]
    assert answer.text == "yes"


def test_role_with_a_text_and_calls_of_tools_are_tokens() -> None:
    """Some servers send the role with every piece."""
    answer = read(
        delta(role="assistant", content="a"),
        delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]),
        delta(finish="tool_calls") + DONE,
    )

    assert answer.times == [0.0, 1.0]


def test_comments_returns_and_other_fields_are_passed_over() -> None:
    """Keep-alives and event names are no answers."""
    answer = read(
        b": ping\r\n\r\nevent: message\r\nid: 7\r\n" + choice("a").replace(b"\n", b"\r\n"),
        b"data:" + choice("b")[6:] + b"data: [DONE]\n\n",
    )

    assert answer.text == "ab"


def test_null_is_what_is_not_said() -> None:
    """Some servers write every field, whether they have something to say or not."""
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
    answer = read(choice("a", "stop"), data({"choices": None, "usage": usage, "error": None}))

    assert answer.text == "a"
    assert answer.usage is not None
    assert answer.usage.completion_tokens is None


def test_end_without_a_finish_is_no_answer() -> None:
    """A connection that is closed in order may still have cut the answer."""
    with pytest.raises(StreamError) as caught:
        read(choice("a"), choice("b"))

    assert caught.value.kind == "truncated"


def test_finish_without_done_is_an_answer() -> None:
    """Not every server ends with the word."""
    assert read(choice("a"), choice("", "stop")).text == "a"


@pytest.mark.parametrize(
    ("chunk", "kind", "detail"),
    [
        (data({"error": {"message": "out of memory"}}), "error_event", "out of memory"),
        (b"data: {nonsense}\n\n", "bad_stream", "malformed"),
        (data({"choices": 7}), "bad_stream", "array"),
        (b"data: \xff\xfe\n\n", "bad_stream", ""),
    ],
)
def test_what_is_no_answer_is_named(chunk: bytes, kind: str, detail: str) -> None:
    """Errors within a stream of status 200 are failures."""
    with pytest.raises(StreamError) as caught:
        read(chunk)

    assert caught.value.kind == kind
    assert detail in caught.value.detail
