"""What Mooncake's codes mean to whoever called."""

import errno
from typing import Final

from opal_connector.mooncake_helper.messages import (
    ALREADY_THERE,
    LEASE_EXPIRED,
    NO_SPACE,
    NOT_FOUND,
    NOT_READY,
    OTHER_SIZE,
    REPLICA_GONE,
    REPLICA_NOT_FOUND,
    RPC_TIMEOUT,
    Answer,
)
from opal_connector.tiers.base import ChecksumMismatchError
from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError

# A value that is being written, or whose last copy has gone, is none for a reader.
_GONE: Final = frozenset((NOT_FOUND, NOT_READY, REPLICA_NOT_FOUND, REPLICA_GONE))
_LATE: Final = frozenset((RPC_TIMEOUT, LEASE_EXPIRED))


def failure(answer: Answer, key: str, *, is_put: bool = False) -> Exception:
    """The error for the first code of an answer, which is below 0."""
    code = answer.codes[0]
    if is_put and code == NO_SPACE:
        return NoSpaceError(errno.ENOSPC, "the store is full", key)
    if is_put and code == ALREADY_THERE:
        return OSError(errno.EBUSY, "somebody else is writing it, or was when he ended", key)
    if not is_put and code in _GONE:
        return ObjectGoneError(errno.ENOENT, "there is no such value", key)
    if code == OTHER_SIZE:
        return ChecksumMismatchError(f"{key} has another size")
    if code in _LATE:
        return TimeoutError(errno.ETIMEDOUT, f"Mooncake did not answer in time ({code})", key)
    return OSError(errno.EIO, f"Mooncake failed ({answer.text or code})", key)
