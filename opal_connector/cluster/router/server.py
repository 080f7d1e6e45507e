"""The router as a server: its paths, its beginning and its end."""

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import msgspec
from aiohttp import HttpVersion10, web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CONTENT_TYPE_LATEST

from opal_connector.cluster.router.access import Keys
from opal_connector.cluster.router.admin import Admin, Handler
from opal_connector.cluster.router.admission import Refusal
from opal_connector.cluster.router.config import RouterConfig
from opal_connector.cluster.router.core import RouterCore, is_taking
from opal_connector.cluster.router.dashboard import PAGE, STATE, Dashboard
from opal_connector.cluster.router.decide import Router
from opal_connector.cluster.router.health import ask
from opal_connector.cluster.router.instances import Instance
from opal_connector.cluster.router.metrics import exposition
from opal_connector.cluster.router.processes import Processes
from opal_connector.cluster.router.shared_router import SharedRouter
from opal_connector.cluster.router.siblings import Share, is_sibling
from opal_connector.cluster.router.upstream import UpstreamBroken
from opal_connector.cluster.router.wire import (
    ADMIN_KEY_HEADER,
    error_answer,
    json_answer,
)
from opal_connector.config import ConfigError, parse_size_bytes
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

FORWARDED: Final = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
_POLL_SECONDS: Final = 0.05
_MODELS_SECONDS: Final = 2.0


class RouterServer:
    """Answers clients.

    Mutable state: the listening socket and whether it drains; everything else is the core's. The
    loop's thread alone uses it.

    Args:
        config: The router's configuration.
        environ: Where the keys are.
        share: Given to one of several processes that share the port, which must be a real one.

    Raises:
        ConfigError: A key, or a file for TLS, is not there.
    """

    def __init__(
        self,
        config: RouterConfig,
        environ: Mapping[str, str] = os.environ,
        share: Share | None = None,
    ) -> None:
        self.config = config
        self._keys = Keys(config, environ)
        self._tls = _tls(config)
        self._max_body_bytes = parse_size_bytes(config.limits.max_body)
        self.core = RouterCore(
            config, environ, router_type=Router if share is None else SharedRouter
        )
        self._processes = None if share is None else Processes(share, self.core)
        self._admin = Admin(self.core)
        self._dashboard = Dashboard(self.core)
        self._handlers = self._paths()
        self._runner: web.ServerRunner | None = None
        self._site: web.TCPSite | None = None
        self.port = config.port

    @property
    def url(self) -> str:
        """Where clients reach it."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    async def start(self) -> None:
        """Know the instances and listen.

        Raises:
            OSError: The address cannot be listened at.
        """
        await self.core.start()
        header_bytes = parse_size_bytes(self.config.limits.max_header)
        server = web.Server(
            self._handle,
            request_factory=self._request,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=_ServerLog(),
            max_line_size=header_bytes,
            max_field_size=header_bytes,
        )
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        if self._processes is not None:
            await self._processes.start(self._runner)
        self._site = web.TCPSite(
            self._runner,
            self.config.host,
            self.config.port,
            ssl_context=self._tls,
            backlog=1024,
            reuse_port=self._processes is not None or None,
        )
        await self._site.start()
        self.port = next(one[1] for one in self._runner.addresses if isinstance(one, tuple))
        logger.info("listening at %s", self.url)
        if not self.config.is_loopback and not self._keys.guards_data:
            logger.warning("whoever reaches %s can use it: no api_key_env is set", self.url)

    async def drain(self) -> bool:
        """Take no new requests and wait for those that are under way; whether all of them ended."""
        self.core.admission.is_draining = True
        self.core.admission.wake()
        if self._site is not None:
            with contextlib.suppress(RuntimeError):
                await self._site.stop()
        deadline = time.monotonic() + self.config.limits.drain_seconds
        while self.core.forwarder.under_way and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        return not self.core.forwarder.under_way

    async def close(self) -> None:
        """End, with whatever is still under way."""
        if self._runner is not None:
            server = self._runner.server
            for connection in server.connections if server is not None else []:
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
        if self._processes is not None:
            await self._processes.close()
        await self.core.close()

    # ---- inside ----

    def _paths(self) -> dict[tuple[str, str], Handler]:
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", path): partial(self._forward, path=path) for path in FORWARDED
        }
        handlers["GET", "/v1/models"] = self._models
        handlers["GET", "/health"] = self._health
        handlers["GET", "/ready"] = self._ready
        handlers["GET", "/metrics"] = self._metrics
        for path in self._dashboard.paths:
            handlers["GET", path] = self._dashboard.file
        for key, handler in [
            *self._admin.handlers.items(),
            (("GET", STATE), self._dashboard.state),
        ]:
            handlers[key] = partial(self._administer, handler=handler)
        return handlers

    def _request(self, *args: Any) -> web.BaseRequest:
        message, payload, protocol, writer, task = args
        return web.BaseRequest(
            message,
            payload,
            protocol,
            writer,
            task,
            asyncio.get_running_loop(),
            client_max_size=self._max_body_bytes,
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = self._handlers.get((request.method, request.path))
        try:
            answer = await (self._unknown(request) if handler is None else handler(request))
        except web.HTTPRequestEntityTooLarge:
            answer = error_answer(413, f"a body may have {self._max_body_bytes} bytes")
            answer.force_close()
        except TimeoutError:
            answer = error_answer(408, "the body does not come")
            answer.force_close()
        except (web.RequestPayloadError, ConnectionResetError):
            answer = error_answer(400, "the body cannot be read")
            answer.force_close()
        if self.core.admission.is_draining and not answer.prepared:
            answer.force_close()
        if handler is not None and not request.path.startswith(PAGE):  # which asks all the time
            self.core.forwarder.counts["answer", str(answer.status)] += 1
        return answer

    async def _administer(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        siblings = None if self._processes is None else self._processes.siblings
        if siblings is not None and is_sibling(request):
            return await self._admin.answer(handler, request)
        if not self._keys.allows_admin(request):
            if self._keys.guards_admin:
                return error_answer(401, f"{ADMIN_KEY_HEADER} is missing or wrong")
            return error_answer(403, "without a key for the admin, only this machine may ask this")
        if siblings is not None and not siblings.is_first:
            return await siblings.pass_on(request)
        return await self._admin.answer(handler, request)

    async def _unknown(self, request: web.BaseRequest) -> web.StreamResponse:
        allowed = [method for method, path in self._handlers if path == request.path]
        if allowed:
            return error_answer(
                405, f"{request.method} is not for this path", headers={"Allow": ", ".join(allowed)}
            )
        return error_answer(404, "there is no such path")

    async def _forward(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if not self._keys.allows_data(request):
            return error_answer(401, "the key is missing or wrong")
        try:
            if request.headers.get("Expect", "").lower() == "100-continue":
                await _go_on(request)
            return await self.core.forwarder.forward(request, path)
        except ConfigError as error:
            return error_answer(400, str(error))
        except Refusal as refusal:
            retry = {"Retry-After": str(refusal.retry_after)}
            return error_answer(refusal.status, refusal.text, headers=retry)

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG002
        return web.Response()

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        text = exposition(self.core)
        if self._processes is not None and not is_sibling(request):
            text = await self._processes.siblings.metrics(text)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _ready(self, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG002
        core = self.core
        if is_taking(core.fleet) and not core.admission.is_draining:
            return web.Response()
        return error_answer(503, "no instance takes requests", headers={"Retry-After": "1"})

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self._keys.allows_data(request):
            return error_answer(401, "the key is missing or wrong")
        now = time.monotonic()
        well = [instance for instance in self.core.fleet if instance.is_well(now)]
        answers = await asyncio.gather(*(self._models_of(instance) for instance in well))
        union: dict[str, Any] = {}
        for answer in answers:
            for model in answer:
                union.setdefault(model["id"], model)
        if not union and not any(answers):
            return error_answer(
                503, "no instance says what it serves", headers={"Retry-After": "1"}
            )
        return json_answer({"object": "list", "data": list(union.values())})

    async def _models_of(self, instance: Instance) -> list[dict[str, Any]]:
        try:
            async with asyncio.timeout(_MODELS_SECONDS):
                status, answer = await ask(instance, "GET", "/v1/models")
            found = msgspec.json.decode(answer) if status == 200 else {}
            data = found.get("data", []) if isinstance(found, dict) else []
        except (UpstreamBroken, TimeoutError, msgspec.DecodeError, RecursionError):
            return []
        return [
            model for model in data if isinstance(model, dict) and isinstance(model.get("id"), str)
        ]


class _ServerLog:
    """What the HTTP server has to say, without what clients sent.

    It quotes what it cannot read, and that may be a key.
    """

    def __init__(self) -> None:
        self._warnings = RateLimitedWarnings(logger)

    def debug(self, *_: Any, **__: Any) -> None:
        """Nothing that anybody needs."""

    def exception(self, _text: str, *_: Any, exc_info: Any = None) -> None:
        """A request that is no HTTP, or a fault of the router's own."""
        kind = type(exc_info).__name__
        if isinstance(exc_info, HttpProcessingError):
            self._warnings.warn(f"http {kind}", "a client sent what is no HTTP (%s)", kind)
        else:
            logger.error("a request could not be answered", exc_info=exc_info)

    error = warning = exception


async def _go_on(request: web.BaseRequest) -> None:
    """A client that asks whether to send its body may."""
    if request.version > HttpVersion10 and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _tls(config: RouterConfig) -> ssl.SSLContext | None:
    security = config.security
    if security.tls_certificate is None or security.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(security.tls_certificate, security.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"security.tls_certificate: found {security.tls_certificate!r}, which cannot be used "
            f"with security.tls_key ({error})"
        ) from None
    return context
