"""What a message may repeat of what a user wrote: messages end up in logs, and secrets must not."""

import re
from collections.abc import Mapping
from typing import Any, Final

_SECRET_FIELDS: Final = frozenset({"options", "environment"})  # whose values may be credentials
_ADDRESS_FIELDS: Final = frozenset({"url", "metadata"})  # in which there may be some
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15})://(.*)", re.DOTALL)
_HOST: Final = re.compile(r"(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:([0-9]{1,5}|\*))?")
_HIDDEN: Final = "…"


def shown(value: Any, where: str = "") -> str:
    """A value as a message repeats it; `where` is the path of its field.

    Of addresses there are the scheme and the host, of mappings the names, and of fields that may
    hold secrets nothing else.
    """
    steps = frozenset(re.split(r"[.\[\]]+", where))
    is_secret = not steps.isdisjoint(_SECRET_FIELDS)
    if isinstance(value, str) and not is_secret:
        is_address = "://" in value or "@" in value or not steps.isdisjoint(_ADDRESS_FIELDS)
        return repr(plain_address(value) if is_address else value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name!r}: {_HIDDEN}' for name in value)}}}"
    if isinstance(value, list | tuple):
        found = ", ".join(shown(one, where) for one in value)
        return f"({found}{',' * (len(value) == 1)})" if isinstance(value, tuple) else f"[{found}]"
    if value is not None and not steps.isdisjoint(_SECRET_FIELDS | _ADDRESS_FIELDS):
        return f"a value of type {type(value).__name__}"
    return repr(value)


def plain_address(text: str) -> str:
    """The scheme and the host of an address; what may be a secret is left out.

    Where it is not certain which part is the host, none is told: a password with a `/` or an `@`
    that is not written as `%XX` makes a part of itself look like one.
    """
    match = _SCHEME.fullmatch(text)
    scheme, rest = (f"{match.group(1)}://", match.group(2)) if match else ("", text)
    first = re.split(r"[/?#]", rest, maxsplit=1)[0]
    host = first.rpartition("@")[2]
    if rest.count("@") != first.count("@") or first.count("@") > 1 or not _HOST.fullmatch(host):
        return f"{scheme}{_HIDDEN}" if text else ""
    return f"{scheme}{host}{f'/{_HIDDEN}' if len(rest) > len(first) else ''}"
