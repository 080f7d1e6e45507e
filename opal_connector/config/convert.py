"""From what a user wrote to a Struct, or to one sentence that says where it is wrong."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from opal_connector.config.errors import ConfigError
from opal_connector.config.shown import shown

_STEP: Final = re.compile(r"([^.\[\]]+)|\[([0-9]+)\]")  # of a path such as instances[0].url
_Struct = TypeVar("_Struct", bound=msgspec.Struct)
Inner = Mapping[str, type[msgspec.Struct]]


def read_mapping(path: str | Path, field: str = "config") -> dict[str, Any]:
    """The mapping that a YAML or JSON file holds; `field` is where its path stands.

    Raises:
        ConfigError: The file cannot be read, or holds something else.
    """
    try:
        content = Path(path).expanduser().read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no such home
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{field}: found {str(path)!r}, which cannot be read ({reason})"
        ) from None
    try:
        loaded = yaml.safe_load(content)  # JSON is YAML
    except yaml.YAMLError as error:
        place = _place(error)  # without the text that stands there
        raise ConfigError(f"{field}: {str(path)!r} is neither JSON nor YAML{place}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{field}: {str(path)!r} holds no mapping of names to values")
    return loaded


def converted(given: Mapping[str, Any], kind: type[_Struct], *, top: str, inner: Inner) -> _Struct:
    """The Struct that a mapping describes.

    Args:
        given: What the user wrote.
        kind: What it is to be.
        top: How the whole is called where no field is at fault.
        inner: The Structs in fields whose own type is not one: in lists, or one of several.

    Raises:
        ConfigError: A field is unknown or of the wrong type.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), given, kind, top, inner)) from None


def _explain(
    message: str, given: Mapping[str, Any], kind: type[msgspec.Struct], top: str, inner: Inner
) -> str:
    """Put msgspec's path first and add what was found there, or what may stand there.

    What may be a secret is not repeated.
    """
    text, _, path = message.partition(" - at ")
    where = path.strip("`").removeprefix("$").removeprefix(".")
    value, owner = _found(where, given, kind, inner)
    if "unknown field" in text:
        field = text.split("`")[1]
        allowed = ", ".join(owner.__struct_fields__)
        full = f"{where}.{field}" if where else field
        return f"{full}: unknown field; allowed here: {allowed}"
    hint = get_type_hints(owner).get(where.rpartition(".")[2])
    if get_origin(hint) is Literal:
        text = f"allowed: {', '.join(get_args(hint))}"
    return f"{where or top}: found {shown(value, where)}; {text[0].lower()}{text[1:]}"


def _found(
    where: str, given: Any, kind: type[msgspec.Struct], inner: Inner
) -> tuple[Any, type[msgspec.Struct]]:
    """The value at a path, and the innermost Struct that it is in or is."""
    owner = kind
    for name, index in _STEP.findall(where):
        if index:
            given = given[int(index)] if isinstance(given, Sequence) else None
            continue
        given = given.get(name) if isinstance(given, Mapping) else None
        owner = inner.get(name) or _struct_of(owner, name) or owner
    return given, owner


def _struct_of(owner: type[msgspec.Struct], name: str) -> type[msgspec.Struct] | None:
    kind = owner.__annotations__.get(name)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _place(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
