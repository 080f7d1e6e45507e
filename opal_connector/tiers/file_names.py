"""Where an object's file lies, and which names there are besides.

    <root>/<16 hex of namespace>/r<rank>[-<slot>]/<2 hex>/<64 hex of chunk hash>-g<group>.opal

Temporary files carry who writes them, so that leftovers of the dead can be told from the work of
the living. The names of other things in a rank's directory cannot be mistaken for either.
"""

import itertools
import os
import re
import socket
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
from xxhash import xxh3_64_hexdigest

from opal_connector.keys import HASH_BYTES
from opal_connector.transfers import ObjectName

SUFFIX: Final = ".opal"
LOCK_NAME: Final = "lock"
INDEX_NAME: Final = "index"
QUARANTINE_NAME: Final = "quarantine"
NAMESPACE_DIGITS: Final = 16
LEFTOVER_SECONDS: Final = 3600.0
_HASH_DIGITS: Final = 2 * HASH_BYTES
_MAX_GROUP: Final = 0xFFFF
_SLOT = re.compile(r"r(\d+)(?:-(\d+))?")
_TEMPORARY = re.compile(r"\.tmp-(\d+)-(\d+)-(\d+)-([0-9a-f]{16})")
_START_TIME_FIELD = 19  # in /proc/PID/stat, behind the name
_counter = itertools.count()


def object_key(name: ObjectName) -> bytes:
    """The key by which books and index know an object."""
    return name.run[-HASH_BYTES:] + name.group.to_bytes(2, "little")


def namespace_name(namespace: bytes) -> str:
    """The directory of a namespace under the root. Short: the header has all of it."""
    return namespace.hex()[:NAMESPACE_DIGITS]


def slot_name(rank: int, slot: int) -> str:
    """The directory of a rank in its namespace; slots tell processes with equal ranks apart."""
    return f"r{rank}-{slot}" if slot else f"r{rank}"


def parse_slot(directory_name: str) -> tuple[int, int] | None:
    """The rank and slot whose directory has this name; None if it is no name of one."""
    match = _SLOT.fullmatch(directory_name)
    if match is None:
        return None
    rank, slot = int(match[1]), int(match[2] or 0)
    # Only the one spelling that `slot_name` writes: nobody takes any other directory.
    return (rank, slot) if slot_name(rank, slot) == directory_name else None


def object_path(directory: str, key: bytes) -> str:
    """The path of an object's file under the directory of its rank."""
    digits = key[:HASH_BYTES].hex()
    group = int.from_bytes(key[HASH_BYTES:], "little")
    return f"{directory}/{digits[:2]}/{digits}-g{group}{SUFFIX}"


def parse_object_file(file_name: str) -> bytes | None:
    """The key of the object whose file has this name; None if it is no name of an object."""
    if not file_name.endswith(SUFFIX) or file_name[_HASH_DIGITS : _HASH_DIGITS + 2] != "-g":
        return None
    digits, group = file_name[:_HASH_DIGITS], file_name[_HASH_DIGITS + 2 : -len(SUFFIX)]
    try:
        chunk_hash, number = bytes.fromhex(digits), int(group)
    except ValueError:
        return None
    # Only the one spelling that `object_path` writes: no two names are the same object.
    if not 0 <= number <= _MAX_GROUP or f"{chunk_hash.hex()}-g{number}{SUFFIX}" != file_name:
        return None
    return chunk_hash + number.to_bytes(2, "little")


class TemporaryName(msgspec.Struct, frozen=True):
    """Who writes a temporary file: a process by its id and start time, and its host."""

    pid: int
    start_time: int
    host: str


def new_temporary_name() -> str:
    """A file name that no other call in any process or host gives."""
    pid, start_time = own_process()
    return f".tmp-{pid}-{start_time}-{next(_counter)}-{host_digits()}"


def parse_temporary(file_name: str) -> TemporaryName | None:
    """Who writes the file of this name; None if it is no name of a temporary file."""
    match = _TEMPORARY.fullmatch(file_name)
    if match is None:
        return None
    return TemporaryName(int(match[1]), int(match[2]), match[4])


def is_leftover(temporary: TemporaryName, *, age_seconds: float) -> bool:
    """Whether nobody will finish this file. The age is by the clock of its filesystem."""
    if temporary.host == host_digits():
        return not is_alive(temporary.pid, temporary.start_time)
    return age_seconds > LEFTOVER_SECONDS


def is_alive(pid: int, start_time: int) -> bool:
    """Whether the process with this id is still the one that started then."""
    try:
        return _start_time(pid) == start_time
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True  # it is there, and we may not look: leave its work alone


def own_process() -> tuple[int, int]:
    """This process, so that others can tell whether it is alive: its id and start time."""
    pid = os.getpid()
    return pid, _own_start_time(pid)


@lru_cache(maxsize=1)
def host_digits() -> str:
    """Sixteen hex digits for the host and the process table that process ids here refer to.

    Containers may share a host's name, and then not its process ids.
    """
    try:
        process_table = os.readlink("/proc/self/ns/pid")
    except OSError:
        process_table = ""  # a kernel without them has one process table
    return xxh3_64_hexdigest(f"{socket.gethostname()}\0{process_table}".encode())


@lru_cache(maxsize=1)
def _own_start_time(pid: int) -> int:
    """The argument makes a forked child ask again."""
    return _start_time(pid)


def _start_time(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[_START_TIME_FIELD])
