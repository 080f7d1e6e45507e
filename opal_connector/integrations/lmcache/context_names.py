"""Where the contexts of a namespace's objects lie. For tools too, which need no LMCache for it.

<root>/<16 hex of namespace>/contexts/<16 hex of context>.json
"""

import re
from typing import Final

CONTEXTS_NAME: Final = "contexts"
_FILE = re.compile(r"[0-9a-f]{16}\.json")


def context_file_name(short: bytes) -> str:
    """The file of the context that names refer to so."""
    return f"{short.hex()}.json"


def is_context_file(file_name: str) -> bool:
    """Whether it is the name of a context's file."""
    return _FILE.fullmatch(file_name) is not None
