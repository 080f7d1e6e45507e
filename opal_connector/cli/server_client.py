"""What the commands ask a vLLM server: a completion with its first-token time, and its numbers.

Needs the extra `demo` (httpx).
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx

from opal_connector.cli.errors import CommandFailure
from opal_connector.cli.prometheus import Sample, parse_prometheus

_REQUEST_SECONDS_MAX: Final = 600.0
_SETTLE_SECONDS_MAX: Final = 30.0
_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True)
class Answer:
    """One completion as it streamed in."""

    ttft_seconds: float
    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int


def read_stream(lines: Iterator[str], clock: Callable[[], float] = time.perf_counter) -> Answer:
    """Assembles the answer of a streamed completion; times count from this call.

    Raises:
        CommandFailure: The server reported an error, or ended without a token.
    """
    started = clock()
    ttft_seconds: float | None = None
    token_ids: list[int] = []
    text = ""
    prompt_tokens = 0
    for line in lines:
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or payload == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(payload)
        if "error" in event:
            raise CommandFailure(f"The server answered with an error: {event['error']}")
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or ()
            if ttft_seconds is None and (ids or choice["text"]):
                ttft_seconds = clock() - started
            token_ids.extend(ids)
            text += choice["text"]
    if ttft_seconds is None:
        raise CommandFailure("The server ended an answer without a single token.")
    return Answer(ttft_seconds, tuple(token_ids), text, prompt_tokens)


class ServerClient:
    """A connection to one server, kept open so that no request pays for making it."""

    def __init__(self, url: str) -> None:
        # Proxies of the environment are for other hosts than this one.
        self._http = httpx.Client(base_url=url, timeout=_REQUEST_SECONDS_MAX, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def complete(self, prompt: str | list[int], *, max_tokens: int) -> Answer:
        """The greedy continuation of a prompt, timed from sending it to the first token.

        Raises:
            CommandFailure: The server refused, failed or went away.
        """
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

        def lines() -> Iterator[str]:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise CommandFailure(f"The server refused the prompt: {response.text}")
                yield from response.iter_lines()

        try:
            return read_stream(lines())
        except httpx.HTTPError as error:
            raise CommandFailure(f"The server did not answer: {error!r}") from error

    def samples(self) -> list[Sample]:
        """What the server's /metrics say now."""
        return parse_prometheus(self._request("GET", "/metrics").text)

    def reset_prefix_cache(self) -> None:
        """Empties the device's prefix cache; asks again while a store still holds blocks of it.

        Raises:
            CommandFailure: Blocks were held for too long.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS_MAX
        while time.monotonic() < deadline:
            answer = self._request("POST", "/reset_prefix_cache")
            # Before 0.32 the endpoint said nothing and its status was the answer.
            if not answer.content or answer.json().get("success", True):
                return
            time.sleep(_POLL_SECONDS)
        raise CommandFailure(
            f"The device's prefix cache could not be emptied within {_SETTLE_SECONDS_MAX:.0f} s: "
            "its blocks are still in use."
        )

    def _request(self, method: str, path: str) -> httpx.Response:
        try:
            response = self._http.request(method, path)
        except httpx.HTTPError as error:
            raise CommandFailure(f"The server did not answer {path}: {error!r}") from error
        if response.is_error:
            raise CommandFailure(f"The server answered {path} with {response.status_code}.")
        return response
