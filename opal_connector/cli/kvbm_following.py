"""Follows the sources that a command was given, as long as it runs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final

from opal_connector.cli.errors import CommandError, CommandFailure
from opal_connector.cli.kvbm_sources import SourceOptions
from opal_connector.cluster.ingest.discovery import DiscoveryError, discover
from opal_connector.cluster.ingest.feed import KVBMFeed
from opal_connector.cluster.ingest.sources import NativeSource, Source, SourceStatus
from opal_connector.cluster.kvbm import KVBM

_POLL_SECONDS: Final = 0.05


class Following:
    """An index and the feed that keeps it right. The loop's thread alone uses it."""

    def __init__(self) -> None:
        self.kvbm = KVBM()
        self._feed = KVBMFeed(self.kvbm)

    def sources(self) -> list[SourceStatus]:
        """Where every source stands now."""
        return self._feed.statuses()

    def add(self, source: Source) -> None:
        """Follow a source from now on.

        Raises:
            CommandError: It is followed already, or cannot be.
        """
        try:
            self._feed.add(source)
        except ValueError as error:
            text = str(error)
            raise CommandError(f"{text[:1].upper()}{text[1:]}.") from error

    async def close(self) -> None:
        """Follow nothing any more."""
        await self._feed.close()


@contextlib.asynccontextmanager
async def follow(options: SourceOptions) -> AsyncIterator[Following]:
    """Follows all sources for the length of an `async with` block.

    Raises:
        CommandError: A source cannot be followed.
        CommandFailure: An engine does not say where its events are.
    """
    sources: list[Source] = [NativeSource(endpoint) for endpoint in options.instances]
    sources += options.engines
    for url in options.engine_urls:
        try:
            sources += await asyncio.to_thread(discover, url)
        except DiscoveryError as error:
            raise CommandFailure(f"{error}.") from error
    following = Following()
    try:
        for source in sources:
            following.add(source)
        yield following
    finally:
        await following.close()


async def await_settled(
    following: Following, seconds: float, stop: asyncio.Event
) -> list[SourceStatus]:
    """Until every source is settled, for so long, or until told; returns those that are not."""
    deadline = time.monotonic() + seconds
    while True:
        unsettled = [one for one in following.sources() if not one.is_settled]
        if not unsettled or time.monotonic() >= deadline or stop.is_set():
            return unsettled
        await asyncio.sleep(_POLL_SECONDS)
