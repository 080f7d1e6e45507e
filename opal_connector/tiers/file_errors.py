"""What can go wrong with an object's file besides a plain `OSError`."""

import errno

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})


class ObjectGoneError(OSError):
    """The object's file is not there: removed meanwhile, or never written."""


class NoSpaceError(OSError):
    """The medium is full, or a quota is used up. What is stored stays readable."""


class SourceError(Exception):
    """What was to be copied cannot be read; the tier that it was to go to is not at fault."""


class AbandonedError(Exception):
    """The caller gave the write up before it was published; nothing of it is left."""


class RefusedError(AbandonedError):
    """The tier itself did not begin the write, and asked its medium nothing."""


def as_gone(error: OSError) -> OSError:
    """The error of a read: an `ObjectGoneError` if the file is not there, else the same."""
    if error.errno in _GONE:
        return ObjectGoneError(error.errno, error.strerror, error.filename)
    return error


def as_no_space(error: OSError) -> OSError:
    """The error of a write: a `NoSpaceError` if the medium is full, else the same."""
    if error.errno in _NO_SPACE:
        return NoSpaceError(error.errno, error.strerror, error.filename)
    return error
