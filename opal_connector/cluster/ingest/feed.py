"""`KVBMFeed`: keeps one index fed by any number of sources, in one event loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final

import zmq

from opal_connector.cluster.ingest.native_machine import NativeMachine
from opal_connector.cluster.ingest.native_source import NativeShell
from opal_connector.cluster.ingest.pump import Context, guarded
from opal_connector.cluster.ingest.sources import NativeSource, Source, SourceStatus
from opal_connector.cluster.ingest.states import (
    BlockIndex,
    SourceLimits,
    SourceMetrics,
    SourceState,
)
from opal_connector.cluster.ingest.vllm_machine import VllmMachine
from opal_connector.cluster.ingest.vllm_ranks import EngineDescription
from opal_connector.cluster.ingest.vllm_source import VllmShell
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.1
_MAX_SOCKETS: Final = 16_384  # ZMQ stops at 1023, and a source has up to four

_Shell = NativeShell | VllmShell


class KVBMFeed:
    """Follows sources and writes what they say to one index.

    A source that is dead, slow or wrong never disturbs another one. Mutable state: the sources by
    name, and which source feeds which worker: the first to name one keeps it. All of it belongs to
    the loop's thread, and the index is used from there only.
    """

    def __init__(
        self,
        index: BlockIndex,
        *,
        limits: SourceLimits | None = None,
        tick_seconds: float = _TICK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._limits = limits or SourceLimits()
        self._tick_seconds = tick_seconds
        self._clock = clock
        self._warnings = RateLimitedWarnings(logger)
        self._context: Context | None = None
        self._shells: dict[str, _Shell] = {}
        self._owners: dict[str, str] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "KVBMFeed":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ---- sources ----

    def add(self, source: Source) -> None:
        """Follow a source from now on; called where the event loop runs.

        Raises:
            ValueError: One of this name is followed already, or its endpoint is none.
        """
        if source.name in self._shells:
            raise ValueError(f"source {source.name!r} is followed already; add it once")
        if self._context is None:
            self._context = zmq.Context()
            self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        try:
            self._shells[source.name] = self._new_shell(source, self._context)
        except zmq.ZMQError as error:
            raise ValueError(
                f"source {source.name!r}: {source!r} names an endpoint that is none such as "
                f"'tcp://127.0.0.1:5601' ({error})"
            ) from error
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._run())

    def remove(self, name: str) -> None:
        """Follow a source no more, and forget at once all that it said.

        Raises:
            KeyError: No source has this name.
        """
        self._shells.pop(name).close()
        for worker_id in [worker for worker, owner in self._owners.items() if owner == name]:
            del self._owners[worker_id]
            self._index.remove_worker(worker_id)

    def resync(self, worker_id: str) -> bool:
        """Compare what is known of a worker with what it has; whether a source feeds it.

        An engine's own stream cannot be compared: there, what is known is given up.
        """
        shell = self._shells.get(self._owners.get(worker_id, ""))
        if shell is None:
            return False
        guarded(shell.resync, partial(self._on_fault, shell.source.name))
        return True

    async def close(self) -> None:
        """Follow nothing any more; the index stays as it is."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        for shell in self._shells.values():
            shell.close()
        self._shells.clear()
        self._owners.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # ---- what is known of them ----

    def statuses(self) -> list[SourceStatus]:
        """Where every source stands now."""
        return [shell.status() for shell in self._shells.values()]

    def states(self) -> dict[str, SourceState]:
        """The state of every source."""
        return {name: shell.machine.state for name, shell in self._shells.items()}

    def metrics(self) -> dict[str, SourceMetrics]:
        """The counters of every source; they go on counting."""
        return {name: shell.machine.metrics for name, shell in self._shells.items()}

    # ---- inside ----

    def _new_shell(self, source: Source, context: Context) -> _Shell:
        name = source.name
        on_fault = partial(self._on_fault, name)
        if isinstance(source, NativeSource):
            machine = NativeMachine(
                self._index,
                name,
                limits=self._limits,
                warnings=self._warnings,
                claim=partial(self._claim_alone, name),
            )
            return NativeShell(source, machine, context, self._clock, on_fault)
        engine = EngineDescription(
            model=source.model, block_tokens=source.block_tokens, rank=source.rank
        )
        return VllmShell(
            source,
            VllmMachine(
                self._index,
                source.worker,
                has_replay=source.replay_endpoint is not None,
                engine=engine,
                limits=self._limits,
                warnings=self._warnings,
                claim=partial(self._claim, name),
            ),
            context,
            self._clock,
            on_fault,
        )

    def _claim(self, name: str, worker_id: str) -> bool:
        """Whether a source may feed a worker: nobody else does."""
        return self._owners.setdefault(worker_id, name) == name

    def _claim_alone(self, name: str, worker_id: str) -> bool:
        """The same for a source that feeds one worker: whom it fed before is free again."""
        for other in [worker for worker, owner in self._owners.items() if owner == name]:
            if other != worker_id:
                del self._owners[other]
        return self._claim(name, worker_id)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            for name, shell in list(self._shells.items()):
                guarded(shell.tick, partial(self._on_fault, name))

    def _on_fault(self, name: str, error: Exception) -> None:
        """A source's message could not be applied: it alone begins again."""
        self._warnings.warn(
            f"fault {name}", "%s could not be followed, beginning again: %r", name, error
        )
        shell = self._shells.get(name)
        if shell is not None:
            guarded(shell.begin_again, partial(self._say_fault, name))

    def _say_fault(self, name: str, error: Exception) -> None:
        self._warnings.warn(f"fault again {name}", "%s cannot begin again: %r", name, error)
