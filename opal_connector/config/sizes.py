"""Sizes that people write, and the chunk that follows from them."""

import re
from collections.abc import Callable

from opal_connector.config.errors import ConfigError
from opal_connector.config.shown import shown

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")
_AUTO_CHUNK_BYTES = 2 << 20


def parse_size_bytes(value: float | str) -> int:
    """Bytes of a size: a number counts GiB, a string carries its unit ("512MiB", "1.5 GB").

    Raises:
        ValueError: Not a positive size.
    """
    if isinstance(value, str):
        match = _SIZE.match(value)
        if match is None or match.group(2).lower() not in _UNITS:
            raise ValueError(f"{value!r} is not a size such as 8, '512MiB' or '1.5GB'")
        unit = match.group(2).lower()
        # A bare number in quotes means what the bare number means.
        factor = _UNITS[unit] if unit else 1 << 30
        size_bytes = int(float(match.group(1)) * factor)
    else:
        size_bytes = int(value * (1 << 30))
    if size_bytes <= 0:
        raise ValueError(f"{value!r} is not a positive size")
    return size_bytes


def check_size(field: str, value: float | str) -> None:
    """Refuse what is no size.

    Raises:
        ConfigError: It is none.
    """
    try:
        parse_size_bytes(value)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{field}: found {shown(value)}, "
            "allowed: GiB as a positive number, or a size such as '512MiB'"
        ) from None


def chunk_blocks_for(
    chunk_size: int | str,
    *,
    block_tokens: int,
    block_bytes: int,
    warn: Callable[[str], None],
) -> int:
    """Whole blocks per chunk for a `chunk_size` in tokens, or for "auto".

    "auto" is the whole number of blocks nearest 2 MiB. A size that the block size does not divide
    is rounded to the nearest whole number of blocks, with a warning.
    """
    if isinstance(chunk_size, str):
        return max(1, round(_AUTO_CHUNK_BYTES / max(1, block_bytes)))
    blocks = max(1, round(chunk_size / block_tokens))
    if blocks * block_tokens != chunk_size:
        warn(
            f"chunk_size {chunk_size} is not a multiple of the block size {block_tokens}: "
            f"chunks hold {blocks * block_tokens} tokens"
        )
    return blocks
