"""One of several processes that are one router: its books and its ways to the others."""

from typing import Final

from aiohttp import web

from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.peers import Peers
from opal_connector.cluster.router.process_books import ProcessBooks
from opal_connector.cluster.router.shared_router import SharedRouter
from opal_connector.cluster.router.siblings import Share, Siblings

_SETTLE_SECONDS: Final = 2.0


class Processes:
    """What a router has besides when it is several processes.

    Mutable state: that of its parts. The loop's thread alone uses it.

    Args:
        share: Which process this is.
        core: Its router's parts, whose router is a `SharedRouter`.
    """

    def __init__(self, share: Share, core: RouterCore) -> None:
        assert isinstance(core.router, SharedRouter)
        self.siblings = Siblings(share)
        self._books = ProcessBooks(core, core.router)
        self.peers = Peers(share.directory, share.number, share.count, self._books)
        self._books.tell = self.peers.tell

    async def start(self, runner: web.ServerRunner) -> None:
        """Begin to speak with the others; returns when this one knows what they know."""
        await self.peers.start()
        await self.peers.settle(_SETTLE_SECONDS)
        await self._books.settle()
        # Not before: what an administrator changed of what is out of date would count for all.
        await self.siblings.site(runner).start()

    async def close(self) -> None:
        """Speak with nobody any more."""
        self._books.close()
        await self.peers.close()
        await self.siblings.close()
