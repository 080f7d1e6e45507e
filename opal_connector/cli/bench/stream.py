"""Streamed answers of OpenAI's API, taken apart as their bytes come."""

from typing import Any, Final

import msgspec

_DONE: Final = b"[DONE]"


class StreamError(Exception):
    """A stream that is no answer; `kind` names what it is instead."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The endpoint's count of tokens, as far as it counts them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class StreamedAnswer:
    """An answer while it comes.

    Mutable state: what was read so far; one task feeds it.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.is_done = False
        self._texts: list[str] = []
        self._rest = b""

    @property
    def text(self) -> str:
        """The answer so far, without what a model thought before it."""
        return "".join(self._texts)

    def feed(self, chunk: bytes, now: float) -> None:
        """More bytes, which came at that time.

        Raises:
            StreamError: They say that something failed, or are no such stream.
        """
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now)

    def end(self) -> None:
        """There are no more bytes.

        Raises:
            StreamError: The answer is not whole.
        """
        if not self.is_done and self.finish_reason is None:
            raise StreamError("truncated", "the stream ended before the answer did")

    def _take(self, payload: bytes, now: float) -> None:
        if payload == _DONE:
            self.is_done = True
            return
        try:
            event = _decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StreamError("bad_stream", str(error)) from None
        if event.error is not None:
            raise StreamError("error_event", str(event.error))
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices or ():
            if _is_piece(choice):
                self.times.append(now)
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._texts.append(text)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason


def _is_piece(choice: _Choice) -> bool:
    """Whether a token came; its text may be empty, as the first half of a character is."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text) or choice.finish_reason is None
    if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
        return True
    # A role alone is no token: many servers send it before they compute anything.
    return delta.content is not None and delta.role is None and choice.finish_reason is None
