"""What servers that speak RESP answer when they refuse, as errors of the system."""

import errno
from typing import Final

from opal_connector.tiers.file_errors import NoSpaceError

# By the first word of an answer: what happened, and the kind of error.
_BY_CODE: Final[dict[str, tuple[int, str]]] = {
    "OOM": (errno.ENOSPC, "the server is full: maxmemory is reached and nothing may be evicted"),
    "LOADING": (errno.EAGAIN, "the server is still loading its data"),
    "READONLY": (errno.EROFS, "the server is a replica and takes no writes"),
    "MISCONF": (errno.EIO, "the server takes no writes because it cannot save its data"),
    "NOAUTH": (errno.EACCES, "the server asks for a password"),
    "WRONGPASS": (errno.EACCES, "the server does not know this user and password"),
    "NOPERM": (errno.EACCES, "the server does not permit this user what Opal needs"),
    "CLUSTERDOWN": (errno.EHOSTDOWN, "the server belongs to a cluster that is down"),
    "MOVED": (errno.EOPNOTSUPP, "the server is one of a cluster, which Opal does not speak to"),
    "ASK": (errno.EOPNOTSUPP, "the server is one of a cluster, which Opal does not speak to"),
    "CROSSSLOT": (errno.EOPNOTSUPP, "the server is one of a cluster, which Opal does not speak to"),
    "BUSY": (errno.EBUSY, "the server is busy with a script"),
    "MASTERDOWN": (errno.EHOSTDOWN, "the server is a replica that has lost its primary"),
    "NOREPLICAS": (errno.EIO, "the server takes no writes because it has too few replicas"),
    "WRONGTYPE": (errno.EEXIST, "the server has something that is not Opal's under this key"),
    "NOPROTO": (errno.EPROTO, "the server does not speak this version of RESP"),
}
# By a part of an answer that begins with ERR.
_BY_TEXT: Final[dict[str, tuple[int, str]]] = {
    "max number of clients": (errno.EUSERS, "the server has as many clients as it takes"),
    "invalid bulk length": (
        errno.EFBIG,
        "the value is larger than the server's proto-max-bulk-len",
    ),
    "exceeds maximum": (errno.EFBIG, "the value is larger than the server's proto-max-bulk-len"),
    "DB index": (errno.EINVAL, "the server has no database of this number"),
    "unknown command": (errno.EOPNOTSUPP, "the server lacks a command that Opal needs"),
    "without any password configured": (errno.EACCES, "the server has no password and got one"),
}


def refusal(answer: object) -> OSError:
    """The error that an answer means; its text, which may have secrets, is not repeated."""
    text = str(answer)
    code = text.split(" ", 1)[0]
    if code == "OOM":
        return NoSpaceError(*_BY_CODE[code])
    if code in _BY_CODE:
        return OSError(*_BY_CODE[code])
    for part, meaning in _BY_TEXT.items():
        if part in text:
            return OSError(*meaning)
    return OSError(errno.EPROTO, f"the server refuses with {code[:32]}")


def is_no_string(answer: object) -> bool:
    """Whether the answer says that something else than a value of ours is under a key."""
    return str(answer).startswith("WRONGTYPE")


def failed_connect(error: Exception) -> OSError:
    """The error of the system for what `redis` raised while it connected."""
    import redis

    match error:
        case redis.BusyLoadingError():
            return refusal("LOADING")
        case redis.AuthenticationError() | redis.exceptions.AuthorizationError():
            return refusal("WRONGPASS")
        case redis.exceptions.NoPermissionError():
            return refusal("NOPERM")
        case redis.TimeoutError() | TimeoutError():
            return TimeoutError(errno.ETIMEDOUT, "the server did not answer in time")
        case redis.ResponseError():
            return refusal(f"ERR {error}" if error.args else "ERR")
        case redis.ConnectionError():
            text = str(error)
            for part, meaning in _BY_TEXT.items():
                if part in text:
                    return OSError(*meaning)
            return ConnectionError(errno.ECONNREFUSED, f"no connection: {text.rstrip('.')}")
        case _:
            return ConnectionError(errno.ECONNREFUSED, f"no connection: {type(error).__name__}")
