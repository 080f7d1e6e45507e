"""Where an engine publishes its KV events, as its HTTP server says."""

import ssl
import urllib.request
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from opal_connector.cluster.ingest.native_source import with_host_of
from opal_connector.cluster.ingest.sources import VllmSource

_PATH: Final = "/kv_event_sources"
_MAX_BYTES: Final = 1 << 20
_MAX_RANKS: Final = 1_024


class DiscoveryError(Exception):
    """The server names no event source that can be followed; the text says why."""


class _EventsConfig(msgspec.Struct):
    """What an engine says of one rank, as far as it is needed."""

    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"
    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: str = ""


def discover(
    http_base_url: str,
    *,
    worker: str | None = None,
    model: str = "",
    block_tokens: int | None = None,
    timeout_seconds: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> list[VllmSource]:
    """Ask an engine's server for its event sources, one per rank. Waits; not for an event loop.

    Args:
        http_base_url: Where the server is, such as `http://10.0.0.7:8000`.
        worker: What the index calls the engine; without it, the URL's host and port.
        model: What its requests call the model.
        block_tokens: The engine's block size; without it, that of the first block stored.
        timeout_seconds: How long the server may take.
        tls: How its certificate is judged; without it, by those of the system.

    Raises:
        DiscoveryError: It is not reached, answers something else, or publishes nothing.
    """
    mistake = f"{http_base_url!r} is no URL such as 'http://127.0.0.1:8000'"
    try:
        url = urlsplit(http_base_url)
    except ValueError as error:
        raise DiscoveryError(mistake) from error
    if url.scheme not in ("http", "https") or not url.hostname:
        raise DiscoveryError(mistake)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    name = worker or url.netloc.rpartition("@")[2]
    sources = []
    ranks = _ranks(http_base_url.rstrip("/") + _PATH, timeout_seconds, tls)
    for rank, config in sorted(ranks.items()):
        if not config.enable_kv_cache_events or config.publisher != "zmq" or not config.endpoint:
            continue
        replay = config.replay_endpoint
        sources.append(
            VllmSource(
                worker=name,
                endpoint=with_host_of(config.endpoint, f"tcp://{host}:0"),
                replay_endpoint=with_host_of(replay, f"tcp://{host}:0") if replay else None,
                topic=config.topic,
                model=model,
                block_tokens=block_tokens,
                rank=rank,
            )
        )
    if not sources:
        raise DiscoveryError(
            f"{http_base_url} publishes no KV events; its engine needs --kv-events-config"
        )
    return sources


def _ranks(
    url: str, timeout_seconds: float, tls: ssl.SSLContext | None
) -> dict[int, _EventsConfig]:
    # No proxies: whoever asks an engine for its events reaches it as directly as its events.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
    )
    try:
        with opener.open(url, timeout=timeout_seconds) as response:
            body = response.read(_MAX_BYTES + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise DiscoveryError(f"{url} does not answer: {error}") from error
    try:
        raw: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
        ranks = {int(rank): msgspec.convert(config, _EventsConfig) for rank, config in raw.items()}
    except (msgspec.DecodeError, ValueError) as error:
        raise DiscoveryError(f"{url} answers something else: {error}") from error
    if len(ranks) > _MAX_RANKS or any(rank < 0 for rank in ranks):
        raise DiscoveryError(f"{url} names {len(ranks)} ranks, at most {_MAX_RANKS} are followed")
    return ranks
