"""Has an instance read the hottest prefixes from its tiers before it takes requests."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from opal_connector.cluster.request import PrefixRequest
from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.health import ask
from opal_connector.cluster.router.hot_prefixes import HotPrefixes
from opal_connector.cluster.router.instances import Instance
from opal_connector.cluster.router.prompt_tokens import COMPLETIONS
from opal_connector.cluster.router.upstream import UpstreamBroken

logger = logging.getLogger(__name__)

_AT_A_TIME: Final = 4
_POLL_SECONDS: Final = 0.05


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


class Prewarm:
    """Asks for one token after each hot prefix that a process which has just begun can load.

    That is what lies in a tier that it shares with others, or in one of its own that outlives it.
    The engine loads the prefix as it would for a request, and computes next to nothing. What it
    would have to compute is left to the first request that needs it.
    Mutable state: counters, and what `hot` has seen. The loop's thread alone uses it.

    Args:
        core: The router that knows what lies where.
        prefixes: At most so many for an instance.
        seconds: Longer than that it never takes.
    """

    def __init__(self, core: RouterCore, prefixes: int, seconds: float) -> None:
        self._core = core
        self._prefixes = prefixes
        self._seconds = seconds
        self.hot = HotPrefixes()
        self.counts: Counter[str] = Counter()
        core.router.on_begin = self.hot.see

    async def warm(self, instance: Instance) -> None:
        """Warm an instance that is well and takes no requests yet."""
        hottest = self.hot.hottest(self._prefixes)
        if not hottest or not instance.config.channels:
            return
        before = Counter(self.counts)
        try:
            async with asyncio.timeout(self._seconds):
                await self._joined(instance)
                wanted = self._wanted(instance, hottest)
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(_AT_A_TIME):
                        tasks.create_task(self._read_all(instance, wanted))
        except TimeoutError:
            self.counts["late"] += 1
        read = self.counts - before
        logger.info(
            "%s has read %d prefixes with %d tokens before it takes requests",
            instance.name,
            read["prefixes"],
            read["tokens"],
        )

    # ---- inside ----

    async def _joined(self, instance: Instance) -> None:
        """Until its events have told what it is and has; after a restart they begin anew."""
        while not self._core.sources.is_settled(instance) or not self._is_live(instance):
            await asyncio.sleep(_POLL_SECONDS)

    def _is_live(self, instance: Instance) -> bool:
        workers = self._core.index.workers
        return any(name in workers and workers[name].is_live for name in instance.worker_ids)

    def _wanted(
        self, instance: Instance, hottest: list[PrefixRequest]
    ) -> Iterator[tuple[PrefixRequest, int]]:
        """Those that it would load from a lasting tier, and how much of each it would have."""
        index = self._core.index
        for request in hottest:
            matches = index.match(request)
            for worker_id in instance.worker_ids:
                state, match = index.workers.get(worker_id), matches.get(worker_id)
                if state is None or match is None:
                    continue
                tiers = state.description.tiers
                lasting = {one.name for one in tiers if one.is_persistent or one.shared_id}
                if any(tokens for name, tokens in match.tier_tokens.items() if name in lasting):
                    yield request, match.total_tokens
                    break

    async def _read_all(
        self, instance: Instance, wanted: Iterator[tuple[PrefixRequest, int]]
    ) -> None:
        for request, tokens in wanted:
            try:
                status, answer = await ask(
                    instance, "POST", COMPLETIONS, _question(instance, request, tokens)
                )
            except UpstreamBroken:
                status, answer = 0, b""
            if status != 200:
                self.counts["failed"] += 1
                continue
            self.counts["prefixes"] += 1
            self.counts["tokens"] += _cached_tokens(answer)


def _question(instance: Instance, request: PrefixRequest, tokens: int) -> bytes:
    """For one token after what is there; of a whole prefix the engine computes the end anyway."""
    body: dict[str, Any] = {
        "prompt": request.token_ids[: tokens + 1],
        "max_tokens": 1,
        "temperature": 0,
    }
    models = [name for name, parent in instance.models.items() if parent is None]
    model = request.lora_name or (models[0] if models else None)
    if model is not None:
        body["model"] = model
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return msgspec.json.encode(body)


def _cached_tokens(answer: bytes) -> int:
    try:
        usage = _answer.decode(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return 0
    details = usage.prompt_tokens_details if usage is not None else None
    return (details.cached_tokens or 0) if details is not None else 0
