"""An engine without a model: vLLM's HTTP, a prefix cache of blocks, real native events, faults."""

import asyncio
import json
import ssl
import time
from collections import Counter, OrderedDict
from typing import Any

from aiohttp import web
from fake_channel import BLOCK_TOKENS, DISK, HOST, Device, Source, adapter_of

from opal_connector.cli.server_process import free_port
from opal_connector.cluster.curve import CurveServer
from opal_connector.cluster.publisher import ChannelSettings, Publisher
from opal_connector.config import Endpoint
from opal_connector.events import DEVICE_TIER, Delete, Insert, KVCEvent, ObjectFact
from opal_connector.keys import CHAIN_ROOT, RequestIdentity, TokenChain

MODEL = "fake-model"
PLAIN = RequestIdentity()
_PATIENCE_SECONDS = 10.0


class FakeEngine:
    """One instance. Everything but the publisher happens in the test's own event loop.

    `fault` is what goes wrong with requests for the model from now on, the next `fault_count` of
    them or all: `reset`, `reset_mid_stream`, `hang`, `slow`, `garbage`, or a status.
    """

    def __init__(
        self,
        name: str = "one",
        *,
        model: str = MODEL,
        prefill_tokens_per_second: float = 200_000.0,
        token_seconds: float = 0.0,
        cache_blocks: int = 4_096,
        has_events: bool = True,
        says_cached: bool = True,
        is_cache_on: bool = True,
        replay_bytes: int = 64 << 20,
        adapters: tuple[str, ...] = (),
        curve: CurveServer | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.adapters = adapters
        parents = {model: None, **dict.fromkeys(adapters, model)}
        self.models: list[dict[str, Any]] = [
            {"id": name, "object": "model", "parent": parent} for name, parent in parents.items()
        ]
        self.load_seconds_per_byte: float | None = None  # of the host's memory
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.token_seconds = token_seconds
        self.says_cached = says_cached
        self.is_cache_on = is_cache_on
        self.fault: str | int | None = None
        self.fault_count: int | None = None
        self.is_judge = False  # of requests: all are bad
        self.health_status = 200
        self.tokenize_seconds = 0.0
        self.step: asyncio.Semaphore | None = None  # a stream takes one before each event
        self.on_host: list[ObjectFact] = []
        self.on_disk: list[ObjectFact] = []
        self.streamed_events = 0
        self.tls: ssl.SSLContext | None = None
        self.padding = ""  # of every event of a stream
        self.running = 0
        self.prefilled_tokens = 0
        self.hit_tokens = 0
        self.ended: Counter[str] = Counter()
        self.seen: list[tuple[str, list[tuple[bytes, bytes]], bytes]] = []
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._cache_blocks = cache_blocks
        self._prefill = asyncio.Lock()
        self._has_events = has_events
        self._replay_bytes = replay_bytes
        self._curve = curve
        self._publisher: Publisher | None = None
        self._runner: web.ServerRunner | None = None
        self.port = 0

    # ---- its life ----

    async def start(self) -> "FakeEngine":
        await self.listen()
        if self._has_events:
            await self._publish()
        return self

    async def listen(self) -> None:
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _publish(
        self, endpoint: Endpoint | None = None, publish_endpoint: Endpoint | None = None
    ) -> None:
        settings = ChannelSettings(
            endpoint=endpoint or Endpoint("127.0.0.1", free_port(2)),
            publish_endpoint=publish_endpoint,
            instance_id=self.name,
            coalesce_seconds=0.005,
            heartbeat_seconds=0.1,
            replay_bytes=self._replay_bytes,
            curve=self._curve,
        )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        publisher = Publisher(settings, Source(self), Device())
        publisher.start()
        while publisher.publish_endpoint is None:  # perhaps its port is still in use
            assert time.monotonic() < deadline, "the channel does not open"
            await asyncio.sleep(0.005)
        self._publisher = publisher

    async def close(self) -> None:
        await self.stop_listening()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)

    async def stop_listening(self) -> None:
        """Connections are reset and new ones refused, as when the process is killed."""
        runner, self._runner = self._runner, None
        if runner is None:
            return
        assert runner.server is not None
        for connection in runner.server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def restart(self) -> None:
        """The process ends and another one comes up at the same addresses, with what is on disk."""
        await self.stop_listening()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
        self._cache.clear()
        self.on_host.clear()
        self.running = 0
        await self.listen()
        if publisher is not None:
            await self._publish(publisher.endpoint, publisher.publish_endpoint)

    @property
    def url(self) -> str:
        return f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def events(self) -> str:
        assert self._publisher is not None
        assert self._publisher.endpoint is not None
        return self._publisher.endpoint.announced

    @property
    def stream(self) -> str:
        """Where the events are published."""
        assert self._publisher is not None
        assert self._publisher.publish_endpoint is not None
        return self._publisher.publish_endpoint.announced

    def config(self, **changes: Any) -> dict[str, Any]:
        """What a router is told about it."""
        events = {"events": self.events} if self._has_events else {}
        return {"url": self.url, "name": self.name, **events, **changes}

    # ---- its cache ----

    def hashes(self, token_ids: list[int], identity: RequestIdentity = PLAIN) -> list[bytes]:
        chain = TokenChain(identity, BLOCK_TOKENS)
        chain.extend(token_ids)
        return chain.hashes

    def cached_tokens(self, token_ids: list[int], identity: RequestIdentity = PLAIN) -> int:
        """Whole blocks from the start, but never the whole prompt."""
        blocks = 0
        for block in self.hashes(token_ids, identity)[: (len(token_ids) - 1) // BLOCK_TOKENS]:
            if block not in self._cache:
                break
            blocks += 1
        return blocks * BLOCK_TOKENS

    def store(self, token_ids: list[int], identity: RequestIdentity = PLAIN) -> None:
        """The blocks of a prompt are on the device now, and that is said."""
        parent = CHAIN_ROOT
        for block in self.hashes(token_ids, identity):
            if block not in self._cache:
                self._tell(Insert(ObjectFact(0, parent, block), DEVICE_TIER))
            self._cache[block] = parent
            self._cache.move_to_end(block)
            parent = block
        while len(self._cache) > self._cache_blocks:
            block, parent = self._cache.popitem(last=False)
            self._tell(Delete(ObjectFact(0, parent, block), DEVICE_TIER))

    def store_below(self, token_ids: list[int], tier: str = DISK) -> None:
        """The blocks of a prompt are in a tier below the device, and that is said."""
        fact = ObjectFact(0, CHAIN_ROOT, b"".join(self.hashes(token_ids)))
        (self.on_host if tier == HOST else self.on_disk).append(fact)
        assert self._publisher is not None
        self._publisher.hear(Insert(fact, tier))

    def lose_silently(self) -> None:
        """The cache is gone, and nobody is told."""
        self._cache.clear()

    def _tell(self, event: KVCEvent) -> None:
        if self._publisher is not None:
            self._publisher.hear_device(event)

    # ---- HTTP ----

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        about = self._about(path)
        if about is not None:
            return about
        request._client_max_size = 1 << 30
        raw = await request.read()
        self.seen.append((path, list(request.raw_headers), raw))
        if path in ("/tokenize", "/detokenize"):
            await asyncio.sleep(self.tokenize_seconds)
            return web.json_response({"tokens": self._tokens(json.loads(raw)), "count": 1})
        if self.is_judge:
            return web.json_response({"error": {"message": "bad request"}}, status=400)
        fault = self._take_fault()
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "no"}}, status=fault)
        if fault in ("reset", "garbage"):
            assert request.transport is not None
            if fault == "garbage":
                request.transport.write(b"\x00\x01 this is no HTTP\r\n\r\n")
            else:
                request.transport.abort()
            return web.Response()
        if fault == "hang":
            await self._hang()
        try:
            body = json.loads(raw)
        except ValueError:
            return web.json_response({"error": {"message": "bad JSON"}}, status=400)
        return await self._complete(request, body, fault)

    def _about(self, path: str) -> web.Response | None:
        """What is told to whoever looks, and is no work."""
        if path == "/health":
            return web.Response(status=self.health_status)
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": self.models})
        if path == "/metrics":
            return web.Response(text=self._metrics())
        return None

    def _metrics(self) -> str:
        name = "vllm:prompt_tokens_cached_by_source_total"
        return f'# TYPE {name} counter\n{name}{{source="device"}} {self.hit_tokens}\n'

    def _take_fault(self) -> str | int | None:
        fault = self.fault
        if fault is not None and self.fault_count is not None:
            self.fault_count -= 1
            if self.fault_count <= 0:
                self.fault, self.fault_count = None, None
        return fault

    async def _hang(self) -> None:
        self.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended["cancelled"] += 1
            raise
        finally:
            self.running -= 1

    def _identity(self, body: dict[str, Any]) -> RequestIdentity:
        lora = adapter_of(body["model"]) if body.get("model") in self.adapters else None
        return RequestIdentity(lora=lora, cache_salt=body.get("cache_salt"))

    @staticmethod
    def _tokens(body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", body.get("input", ""))
        if isinstance(prompt, list):
            return prompt
        if "messages" in body:
            prompt = "".join(f"{one['role']}:{one['content']}\n" for one in body["messages"])
        return list(str(prompt).encode()) or [0]

    async def _complete(
        self, request: web.BaseRequest, body: dict[str, Any], fault: str | None
    ) -> web.StreamResponse:
        self.running += 1
        try:
            token_ids = self._tokens(body)
            async with self._prefill:
                identity = self._identity(body)
                cached = self.cached_tokens(token_ids, identity)
                self.prefilled_tokens += len(token_ids) - cached
                self.hit_tokens += cached
                await asyncio.sleep((len(token_ids) - cached) / self.prefill_tokens_per_second)
                if self.is_cache_on:
                    self.store(token_ids, identity)
            count = int(body.get("max_tokens") or 4)
            usage = self._usage(len(token_ids), cached, count)
            if body.get("stream"):
                answer = await self._stream(request, body, usage, fault)
            else:
                await asyncio.sleep(self.token_seconds * count)
                choices = [{"index": 0, "text": "x" * count}]
                answer = web.json_response({"id": "1", "choices": choices, "usage": usage})
            self.ended["whole"] += 1
            return answer
        except (asyncio.CancelledError, ConnectionResetError):
            self.ended["cancelled"] += 1
            raise
        finally:
            self.running -= 1

    def _usage(self, prompt_tokens: int, cached: int, count: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def _stream(
        self, request: web.BaseRequest, body: dict[str, Any], usage: Any, fault: str | None
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for number in range(int(body.get("max_tokens") or 4)):
            if self.step is not None:
                await self.step.acquire()
            text = f"t{number}{self.padding}"
            event = {"id": "1", "choices": [{"index": 0, "text": text}], "usage": None}
            data = f"data: {json.dumps(event)}\n\n".encode()
            if fault == "slow":
                for place in range(len(data)):
                    await answer.write(data[place : place + 1])
                    await asyncio.sleep(0.0005)
            else:
                await answer.write(data)
            self.streamed_events += 1
            if fault == "reset_mid_stream" and number == 1:
                assert request.transport is not None
                request.transport.abort()
                return answer
            await asyncio.sleep(self.token_seconds)
        if self.step is not None:
            await self.step.acquire()
        last = {"id": "1", "choices": [], "usage": usage}
        await answer.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        return answer
