"""The router's page: what a browser loads once, and what it asks for every second."""

from importlib.resources import files
from typing import Final

from aiohttp import web

from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.dashboard_snapshot import snapshot
from opal_connector.cluster.router.wire import json_answer

PAGE: Final = "/dashboard"
STATE: Final = f"{PAGE}/state"
_KINDS: Final = {
    "index.html": "text/html",
    "style.css": "text/css",
    "app.js": "text/javascript",
    "tables.js": "text/javascript",
    "decisions.js": "text/javascript",
    "charts.js": "text/javascript",
    "dom.js": "text/javascript",
    "units.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no text that becomes markup, in no other page.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The page's paths. Who may see the state is judged before; the files say nothing of it.

    Mutable state: none, but for what was read of the files.
    """

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        folder = files("opal_connector.cluster.router") / "page"
        self._files = {
            (PAGE if name == "index.html" else f"{PAGE}/{name}"): (
                kind,
                (folder / name).read_bytes(),
            )
            for name, kind in _KINDS.items()
        }

    @property
    def paths(self) -> list[str]:
        """What a browser loads once."""
        return list(self._files)

    async def file(self, request: web.BaseRequest) -> web.StreamResponse:
        """A part of the page."""
        kind, content = self._files[request.path]
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

    async def state(self, request: web.BaseRequest) -> web.StreamResponse:  # noqa: ARG002
        """Everything that the page shows, as it is now."""
        return json_answer(snapshot(self._core), headers=_HEADERS)
