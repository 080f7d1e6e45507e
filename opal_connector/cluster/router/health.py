"""Watches the instances: who is well, who is failing, who is dead, who is back."""

import asyncio
import logging
import random
import time
from collections.abc import Callable

import msgspec

from opal_connector.cluster.router.config import HealthConfig
from opal_connector.cluster.router.instances import Fleet, Health, Instance
from opal_connector.cluster.router.upstream import UpstreamBroken

logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 4 << 20
_MODELS_SECONDS = 30.0


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_models = msgspec.json.Decoder(_Models)


async def ask(
    instance: Instance, method: str, path: str, body: bytes = b"", *, limit: int = _MAX_ANSWER_BYTES
) -> tuple[int, bytes]:
    """A question of the router's own to an instance: the status and the body of its answer.

    Raises:
        UpstreamBroken: It does not answer, or with more than the limit.
    """
    address = instance.pool.address
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.host_header}"]
    if instance.api_key is not None:
        lines.append(f"Authorization: Bearer {instance.api_key}")
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    connection = await instance.pool.take(is_fresh=True)  # a kept one might be stale
    try:
        connection.send(("\r\n".join(lines) + "\r\n\r\n").encode(), body)
        await connection.head()
        parts: list[bytes] = []
        size = 0
        while chunk := await connection.chunk():
            parts.append(chunk)
            size += len(chunk)
            if size > limit:
                raise UpstreamBroken("garbage", "its answer never ends")
        return connection.status, b"".join(parts)
    finally:
        instance.pool.give(connection)


class HealthWatch:
    """Asks every instance for its health, again and again.

    Mutable state: the tasks by instance, and when each told its models last; what is found out is
    written to the instances. The loop's thread alone uses it.
    """

    def __init__(
        self,
        fleet: Fleet,
        config: HealthConfig,
        *,
        on_death: Callable[[Instance], None],
        on_return: Callable[[Instance], None],
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._on_death = on_death
        self._on_return = on_return
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._models_at: dict[str, float] = {}
        self._random = random.Random()

    def watch(self, instance: Instance) -> None:
        """Watch an instance from now on."""
        self._tasks[instance.name] = asyncio.create_task(self._watch(instance))

    def forget(self, instance: Instance) -> None:
        """Watch an instance no more."""
        task = self._tasks.pop(instance.name, None)
        self._models_at.pop(instance.name, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Watch nobody any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, instance: Instance) -> None:
        """Ask an instance once."""
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                status, _ = await ask(instance, "GET", "/health")
                if status < 300:
                    await self._learn_models(instance)
        except UpstreamBroken as error:
            self.failed(instance, error.kind)
        except TimeoutError:
            self.failed(instance, "timeout")
        else:
            if status < 300:
                self._succeeded(instance)
            else:
                self.failed(instance, str(status))

    def failed(self, instance: Instance, kind: str) -> None:
        """A check failed, or a request was refused."""
        now = time.monotonic()
        if instance.failing_since is None:
            instance.failing_since = now
        instance.failures += 1
        instance.refused = instance.refused + 1 if kind == "refused" else 0
        if instance.health is Health.DEAD:
            return
        is_over = now - instance.failing_since >= self._config.dead_after_seconds
        if is_over or instance.refused >= self._config.refused_connections:
            self.died(instance)
        elif instance.health is Health.UP and instance.failures >= self._config.failing_after:
            logger.warning("%s fails its health checks (%s)", instance.name, kind)
            instance.health = Health.FAILING
            self._fleet.on_change()

    def died(self, instance: Instance) -> None:
        """It is dead: found out here, or told by who saw its process end."""
        if instance.health is Health.DEAD:
            return
        instance.health = Health.DEAD
        self._on_death(instance)
        self._fleet.on_change()

    # ---- inside ----

    def _succeeded(self, instance: Instance) -> None:
        was = instance.health
        instance.failing_since = None
        instance.failures = instance.refused = 0
        if was is Health.UP:
            return
        instance.health = Health.UP
        logger.info("%s takes requests", instance.name)
        if was is Health.DEAD:
            self._on_return(instance)
        self._fleet.on_change()

    async def _learn_models(self, instance: Instance) -> None:
        """Which models and adapters it serves; one that does not say so serves any."""
        now = time.monotonic()
        learned_at = self._models_at.get(instance.name)
        is_known = learned_at is not None and now - learned_at < _MODELS_SECONDS
        if is_known and instance.health is Health.UP:
            return
        status, answer = await ask(instance, "GET", "/v1/models")
        if status != 200:
            return
        try:
            found = _models.decode(answer)
        except (msgspec.DecodeError, RecursionError):
            return
        instance.models = {model.id: model.parent for model in found.data}
        self._models_at[instance.name] = now

    async def _watch(self, instance: Instance) -> None:
        config = self._config
        while True:
            await self.check(instance)
            self._fleet.on_change()  # a breaker may have begun to let requests try
            spread = config.interval_seconds * config.jitter
            await asyncio.sleep(config.interval_seconds + self._random.uniform(-spread, spread))
