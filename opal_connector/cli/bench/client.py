"""An OpenAI-compatible endpoint as the benchmark speaks to it. Needs aiohttp."""

import asyncio
import time
from typing import Any, Final

import aiohttp
import msgspec

from opal_connector.cli.bench.result import RequestRecord
from opal_connector.cli.bench.stream import StreamedAnswer, StreamError
from opal_connector.cli.bench.workload import Message
from opal_connector.cli.errors import CommandFailure

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
ENDPOINTS: Final = (COMPLETIONS, CHAT)
_ASK_SECONDS_MAX: Final = 30.0
# Below the five seconds after which common servers close a silent connection: one that is closed
# while a request goes out on it would be counted as a failure of the server.
_KEEPALIVE_SECONDS: Final = 4.0
_DETAIL_MAX: Final = 500
_WORKER_HEADER: Final = "x-opal-worker"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what every one of them says.

    Attributes:
        url: The server, with or without `/v1` at its end.
        model: The model's name; None asks the server.
        endpoint: The path; None takes the one that suits the workload.
        headers: Of every request; they are never written down.
        timeout_seconds: For a whole request.
        temperature: 0 makes answers that can be compared.
        ignore_eos: Answers have as many tokens as they may; only vLLM and its kin know that.
        extra_body: Fields of every body, which win.
        session_header: The header that names a request's conversation, none if empty.
        metrics_urls: The instances' `/metrics`; None finds out where they are.
    """

    url: str
    model: str | None = None
    endpoint: str | None = None
    headers: dict[str, str] = {}
    timeout_seconds: float = 600.0
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = {}
    session_header: str = ""
    metrics_urls: tuple[str, ...] | None = None

    @property
    def base(self) -> str:
        """The server's address without a path of the API."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


class Client:
    """Connections to one endpoint, as many as there are requests.

    Mutable state: the connections, which aiohttp guards.
    """

    def __init__(self, target: Target, session: aiohttp.ClientSession, endpoint: str) -> None:
        self.endpoint = endpoint
        self.model = target.model or ""
        self._target = target
        self._session = session
        self._url = target.base + endpoint

    async def find_model(self) -> None:
        """Asks for the first model, where none was named.

        Raises:
            CommandFailure: The server does not say.
        """
        if self.model:
            return
        listing = await fetch_json(self._session, f"{self._target.base}/v1/models", self._headers())
        models = listing.get("data") if isinstance(listing, dict) else None
        first = models[0] if isinstance(models, list) and models else None
        if not isinstance(first, dict) or not first.get("id"):
            raise CommandFailure(f"{self._target.base} lists no model; name one with --model.")
        self.model = str(first["id"])

    def body(self, prompt: list[int] | str | list[Message], output_tokens: int) -> bytes:
        """A request as it is sent."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if self.endpoint == CHAT else "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.temperature is not None:
            body["temperature"] = self._target.temperature
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self._target.extra_body})

    async def ask(self, body: bytes, record: RequestRecord) -> None:
        """Sends a request and writes into `record` what came of it; it never raises."""
        answer = StreamedAnswer()
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._target.timeout_seconds):
                await self._stream(body, record, answer, started)
        except StreamError as error:
            record.error, record.error_detail = error.kind, error.detail[:_DETAIL_MAX]
        except TimeoutError:
            record.error = "timeout"
            record.error_detail = f"no whole answer within {self._target.timeout_seconds:g} s"
        except aiohttp.ClientConnectorError as error:
            record.error, record.error_detail = "no_connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            record.error, record.error_detail = "connection_broken", repr(error)[:_DETAIL_MAX]
        record.latency_seconds = time.perf_counter() - started
        _note(record, answer)

    async def _stream(
        self, body: bytes, record: RequestRecord, answer: StreamedAnswer, started: float
    ) -> None:
        headers = self._headers(record.conversation_id)
        async with self._session.post(self._url, data=body, headers=headers) as response:
            record.http_status = response.status
            record.worker = response.headers.get(_WORKER_HEADER)
            if response.status != 200:
                raise StreamError(f"http_{response.status}", await response.text(errors="replace"))
            if response.content_type != "text/event-stream":
                raise StreamError("not_streamed", f"the answer is {response.content_type}")
            async for chunk in response.content.iter_any():
                answer.feed(chunk, time.perf_counter() - started)
            answer.end()

    def _headers(self, conversation_id: str = "") -> dict[str, str]:
        headers = {"Content-Type": "application/json", **self._target.headers}
        if self._target.session_header and conversation_id:
            headers[self._target.session_header] = conversation_id
        return headers


def _note(record: RequestRecord, answer: StreamedAnswer) -> None:
    record.token_seconds = answer.times
    record.output_text = answer.text
    record.finish_reason = answer.finish_reason
    record.output_tokens = len(answer.times)
    usage = answer.usage
    if usage is None:
        return
    if usage.prompt_tokens is not None:
        record.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        record.output_tokens = usage.completion_tokens
    record.is_usage_reported = None not in (usage.prompt_tokens, usage.completion_tokens)
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens


def open_session() -> aiohttp.ClientSession:
    """Connections without a limit; proxies of the environment are for other hosts."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)


async def fetch_json(session: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> Any:
    """The JSON at an address.

    Raises:
        CommandFailure: There is none.
    """
    try:
        async with asyncio.timeout(_ASK_SECONDS_MAX), session.get(url, headers=headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                raise CommandFailure(f"{url} answered with {answer.status}.")
            return msgspec.json.decode(content)
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        raise CommandFailure(f"{url} did not answer as it should: {error!r}.") from error
