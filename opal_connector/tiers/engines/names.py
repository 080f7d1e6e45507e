"""Where an object lies in an engine: a key that names it completely.

    <64 hex of namespace>/r<rank>/<64 hex of chunk hash>-g<group>

The whole namespace is in it, so that no two objects can have one key; what stands before it (a
bucket's prefix, a database) is the client's.
"""

from opal_connector.keys import HASH_BYTES

PROBE_NAME = "probe"


def rank_prefix(namespace: bytes, rank: int) -> str:
    """What the keys of all objects of one rank begin with."""
    return f"{namespace.hex()}/r{rank}/"


def value_key(prefix: str, key: bytes) -> str:
    """The engine's key of the object that books know by `key`."""
    group = int.from_bytes(key[HASH_BYTES:], "little")
    return f"{prefix}{key[:HASH_BYTES].hex()}-g{group}"


def parse_value_key(prefix: str, text: str) -> bytes | None:
    """The books' key of an object with this key in the engine; None for anything else."""
    digits, separator, group = text.removeprefix(prefix).partition("-g")
    try:
        key = bytes.fromhex(digits) + int(group).to_bytes(2, "little") if separator else b""
    except (ValueError, OverflowError):
        return None
    # Only the one spelling that `value_key` writes: no two keys are the same object.
    is_ours = len(key) == HASH_BYTES + 2 and value_key(prefix, key) == text
    return key if is_ours else None
