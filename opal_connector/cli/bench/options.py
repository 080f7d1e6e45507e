"""The options of `opal bench`: those of every workload from its fields, and those of all."""

import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Union, get_args, get_origin
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Meta

from opal_connector.cli.bench.workload import FIRST_TOKEN_ID, Workload
from opal_connector.cli.errors import CommandError
from opal_connector.cli.numbers import NonNegative

ENDPOINTS: Final = ("/v1/completions", "/v1/chat/completions")
_TRACE: Final = "trace_file"
_UNBOUNDED: Final = frozenset({"request_rate"})  # infinity sends all at once


def workload_options(workload: type[Workload]) -> list[click.Parameter]:
    """An option for every field that describes itself, and the trace as an argument."""
    parameters: list[click.Parameter] = []
    for field in msgspec.structs.fields(workload):
        if field.name == _TRACE:
            path = click.Path(exists=True, dir_okay=False, path_type=Path)
            parameters.append(click.Argument([_TRACE], type=path, metavar="TRACE"))
            continue
        help_text, kind = _described(field.type)
        if help_text is None:
            continue
        parameters.append(
            click.Option(
                [f"--{field.name.replace('_', '-')}"],
                type=_click_type(field.name, kind),
                default=field.default,
                show_default=field.default is not None,
                help=help_text,
            )
        )
    return parameters


def _described(annotation: Any) -> tuple[str | None, type]:
    """The description of a field, None without one, and its type without None."""
    metadata = getattr(annotation, "__metadata__", ())
    text = next((one.description for one in metadata if isinstance(one, Meta)), None)
    kind = get_args(annotation)[0] if metadata else annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return text, kind


def _click_type(name: str, kind: type) -> Any:
    if kind is int:
        return click.INT
    return click.FLOAT if name in _UNBOUNDED else NonNegative()


def common_options() -> list[click.Parameter]:
    """Whom to ask, how, and what to write."""
    return [*_endpoint_options(), *_request_options(), *_result_options()]


def _endpoint_options() -> list[click.Parameter]:
    return [
        click.Option(["--url"], required=True, callback=_url, help="The server: http://HOST:PORT."),
        click.Option(["--model"], help="The model's name.  [default: the server's first]"),
        click.Option(
            ["--endpoint"],
            type=click.Choice(ENDPOINTS),
            help="What to ask.  [default: what suits the workload]",
        ),
        click.Option(
            ["--header", "headers"],
            multiple=True,
            metavar="'NAME: VALUE'",
            callback=_headers,
            help="Of every request. May be repeated.",
        ),
        click.Option(
            ["--api-key-env"],
            metavar="NAME",
            callback=_api_key,
            help="The environment variable that holds the API key.",
        ),
    ]


def _request_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["--session-header"],
            metavar="NAME",
            default="",
            callback=_session_header,
            help="Name the conversation of a request in this header.",
        ),
        click.Option(
            ["--timeout", "timeout_seconds"],
            type=click.FloatRange(min=0, min_open=True),
            default=600.0,
            show_default=True,
            help="Seconds for a whole request.",
        ),
        click.Option(
            ["--temperature"],
            type=NonNegative(),
            default=0.0,
            show_default=True,
            help="Of answers.",
        ),
        click.Option(
            ["--ignore-eos"],
            is_flag=True,
            help="Answers have their full length (vLLM's own field).",
        ),
        click.Option(
            ["--extra-body"],
            metavar="JSON",
            default="{}",
            callback=_object,
            help="Fields of every request's body; they win.",
        ),
        click.Option(
            ["--vocab-size"],
            type=click.IntRange(FIRST_TOKEN_ID + 1),
            default=256,
            show_default=True,
            help="Token ids of prompts are below this.",
        ),
    ]


def _result_options() -> list[click.Parameter]:
    file = click.Path(dir_okay=False, path_type=Path)
    return [
        click.Option(
            ["--metrics", "metrics_urls"],
            multiple=True,
            metavar="URL",
            callback=_urls,
            help="An instance, whose /metrics say which tier tokens came from. May be repeated.  "
            "[default: the server, or all behind Opal's router]",
        ),
        click.Option(
            ["--json", "json_file"], type=file, callback=_writable, help="Write everything here."
        ),
        click.Option(
            ["--plot", "plot_file"],
            type=file,
            callback=_writable,
            help="Draw it; needs matplotlib.",
        ),
    ]


def _url(_context: click.Context, parameter: click.Parameter, value: str) -> str:
    option = parameter.opts[0]
    try:
        parts = urlsplit(value)
    except ValueError:
        parts = urlsplit("")
    if "@" in parts.netloc:  # it would be in the output; it may be a password and is not shown here
        raise CommandError(f"{option}: found a name before the host; a --header may have it.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandError(f"{option}: found {value!r}, allowed: http://HOST:PORT or https://...")
    return value


def _urls(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> tuple[str, ...] | None:
    return tuple(_url(context, parameter, value) for value in values) or None


def _headers(
    _context: click.Context, _parameter: click.Parameter, values: Sequence[str]
) -> dict[str, str]:
    headers = {}
    for value in values:
        name, colon, content = value.partition(":")
        if not colon or not name.strip():
            raise CommandError("--header: found no 'NAME: VALUE' in one of them.")
        headers[name.strip()] = _in_a_header("--header", content)
    return headers


def _session_header(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    return _in_a_header("--session-header", value)


def _in_a_header(option: str, text: str) -> str:
    """The text without spaces around it, never shown where it is refused: it may be a key.

    Raises:
        CommandError: No header takes it.
    """
    stripped = text.strip()
    if not stripped.isprintable():
        raise CommandError(f"{option}: found a character in it that no header takes.")
    return stripped


def _api_key(_context: click.Context, _parameter: click.Parameter, name: str | None) -> str | None:
    if name is None:
        return None
    key = _in_a_header("--api-key-env", os.environ.get(name, ""))
    if not key:
        raise CommandError(f"--api-key-env: the environment variable {name} is not set.")
    return key


def _object(_context: click.Context, _parameter: click.Parameter, value: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CommandError(f"--extra-body: {error}; allowed: a JSON object.") from None


def _writable(
    _context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Refuses a file in a directory that is not there, before minutes are spent."""
    if path is not None and not path.absolute().parent.is_dir():
        raise CommandError(
            f"--{str(parameter.name).removesuffix('_file')}: there is no directory {path.parent}."
        )
    return path
