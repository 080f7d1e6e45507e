"""Where `opal kvbm` listens: the options that name instances and engines."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
import msgspec

from opal_connector.cli.errors import CommandError
from opal_connector.cluster.ingest.sources import VllmSource
from opal_connector.config.endpoints import parse_endpoint

_Command = TypeVar("_Command", bound=Callable[..., Any])
_EVERYWHERE: Final = frozenset({"*", "0.0.0.0", "[::]"})


class SourceOptions(msgspec.Struct, frozen=True):
    """All sources that were named: Opal's channels, engines' streams, engines to be asked."""

    instances: tuple[str, ...] = ()
    engines: tuple[VllmSource, ...] = ()
    engine_urls: tuple[str, ...] = ()


def source_options(command: _Command) -> _Command:
    """Adds the options to a command, which takes them as `instances`, `engines`, `engine_urls`."""
    for option in (
        click.option(
            "--vllm-url",
            "engine_urls",
            multiple=True,
            metavar="http://HOST:PORT",
            help="A plain vLLM server, which is asked where its KV events are.",
        ),
        click.option(
            "--vllm",
            "engines",
            multiple=True,
            metavar="NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT]",
            help="The KV events of a plain vLLM engine.",
        ),
        click.option(
            "--instance",
            "instances",
            multiple=True,
            metavar="tcp://HOST:PORT",
            help="The event channel of an Opal instance (events.endpoint in its configuration).",
        ),
    ):
        command = option(command)
    return command


def read_sources(
    instances: tuple[str, ...], engines: tuple[str, ...], engine_urls: tuple[str, ...]
) -> SourceOptions:
    """The sources that the options name.

    Raises:
        CommandError: One of them names no source, one is named twice, or there is none at all.
    """
    found = SourceOptions(
        tuple(_address("--instance", one) for one in instances),
        tuple(_engine(one) for one in engines),
        tuple(_url(one) for one in engine_urls),
    )
    names = [*found.instances, *(engine.name for engine in found.engines), *found.engine_urls]
    if not names:
        raise CommandError("Name at least one source, with --instance, --vllm or --vllm-url.")
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"{name} is named twice; a source is named once.")
    return found


def _address(option: str, text: str) -> str:
    try:
        endpoint = parse_endpoint(text)
    except ValueError as error:
        raise CommandError(f"{option} takes tcp://HOST:PORT, not {text!r}.") from error
    if endpoint.host in _EVERYWHERE or not endpoint.port:
        raise CommandError(f"{option} needs the host and the port to connect to, not {text!r}.")
    return endpoint.address


def _engine(text: str) -> VllmSource:
    name, equals, rest = text.partition("=")
    events, *others = rest.split(",")
    if not name or not equals:
        raise CommandError(
            f"--vllm takes NAME=tcp://HOST:PORT[,replay=tcp://HOST:PORT], not {text!r}."
        )
    replay: str | None = None
    for other in others:
        key, _, value = other.partition("=")
        if key != "replay" or replay:
            raise CommandError(f"--vllm has one replay= behind its endpoint, not {other!r}.")
        replay = _address("--vllm replay", value)
    return VllmSource(worker=name, endpoint=_address("--vllm", events), replay_endpoint=replay)


def _url(text: str) -> str:
    scheme, separator, rest = text.partition("://")
    if scheme not in {"http", "https"} or not separator or not rest.strip("/"):
        raise CommandError(f"--vllm-url takes http://HOST:PORT, not {text!r}.")
    return text.rstrip("/")
