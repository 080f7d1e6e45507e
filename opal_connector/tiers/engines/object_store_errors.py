"""What a bucket answers, as kinds of `OSError` and one sentence that has no secret in it."""

import errno
import re
from typing import Final

from opal_connector.tiers.file_errors import NoSpaceError, ObjectGoneError

_STATUS: Final = re.compile(r"status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_FULL: Final = frozenset(
    {
        "InsufficientStorage",
        "NotEnoughSpace",
        "OverQuota",
        "QuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    }
)
_REFUSED: Final = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_REFUSALS: Final = frozenset({"PermissionDeniedError", "UnauthenticatedError"})
# Where clouds give credentials to their own machines: who is asked there has no others.
_METADATA_SERVERS: Final = re.compile(r"169\.254\.169|169\.254\.170|metadata\.google\.internal")
_TIMEOUT: Final = re.compile(r"kind: Timeout|TimedOut|operation timed out")
_CONNECT: Final = re.compile(r"kind: Connect\b")
_HTTP_FULL: Final = 507
_HTTP_REFUSED: Final = (401, 403)
_HTTP_BAD_RANGE: Final = 416


def as_os_error(error: Exception, place: str) -> OSError:
    """What the library raised, as a kind of `OSError`; the library's own text is not repeated.

    `place` is the bucket's URL. That text has headers, addresses and what the server said in it.
    """
    text = str(error)
    code = _code(text)
    status = _status(text)
    if code in _NO_BUCKET or "bucket does not exist" in text:
        return no_bucket(place)
    if isinstance(error, FileNotFoundError):
        return ObjectGoneError(errno.ENOENT, f"There is no such value in {place}")
    if status == _HTTP_FULL or code in _FULL:
        return NoSpaceError(errno.ENOSPC, f"{place} is full{_told(status, code)}")
    if _METADATA_SERVERS.search(text):
        reason = "no credentials in the environment, and none from a metadata server"
        return PermissionError(errno.EACCES, f"{place} cannot be used: {reason}")
    if status in _HTTP_REFUSED or type(error).__name__ in _REFUSALS or code in _REFUSED:
        return PermissionError(
            errno.EACCES, f"{place} refuses these credentials{_told(status, code)}"
        )
    return _as_fault(text, place, _told(status, code))


def _as_fault(text: str, place: str, told: str) -> OSError:
    """The error of an engine that did not answer, or not as it should."""
    if _TIMEOUT.search(text):
        return TimeoutError(errno.ETIMEDOUT, f"{place} does not answer in time")
    if _CONNECT.search(text):
        return ConnectionError(errno.ECONNREFUSED, f"{place} cannot be reached")
    if "edirect" in text:
        return OSError(errno.EREMOTE, f"{place} is in another region than the one configured")
    return OSError(errno.EIO, f"{place} failed{told or ': the connection broke'}")


def no_bucket(place: str) -> OSError:
    """The error of a bucket that does not exist; not one that says that a file is not there."""
    return OSError(errno.ENXIO, f"There is no bucket at {place}")


def is_beyond_end(error: Exception) -> bool:
    """Whether a range was asked for that begins where the value has ended already."""
    return _status(str(error)) == _HTTP_BAD_RANGE


def _status(text: str) -> int:
    found = _STATUS.search(text)
    return int(found[1]) if found else 0


def _code(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _told(status: int, code: str) -> str:
    told = " ".join(str(part) for part in (status, code) if part)
    return f" ({told})" if told else ""
