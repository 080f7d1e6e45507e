"""Why a tier does not take an object."""

from enum import StrEnum


class Refusal(StrEnum):
    """Why a tier does not take an object. The value is a metric label."""

    PRESENT = "present"  # it, or a longer one that begins with it, is there or being written
    NO_PARENT = "no_parent"  # nothing could ever reach it
    FULL = "full"  # everything that could leave is in use
    TOO_LARGE = "too_large"
    LEAVING = "leaving"  # an older file of that name is being deleted
    UNAVAILABLE = "unavailable"  # the tier is failing, full for others, or not open yet
