"""What a request says about the future of what it leaves behind."""

import msgspec

KEEP_SECONDS = 1800.0  # of a "keep" without a number


class RequestHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hints of one request. They change an order, never an answer.

    `keep`: evict its chunks last, for so many seconds (true: half an hour). `drop`: store nothing
    of it. `ttl`: its chunks leave when they were not used for so many seconds. `session`: "ends"
    says that no request will continue it, so what is its own goes first.
    """

    keep: bool | float = False
    drop: bool = False
    ttl: float | None = None
    session: str | None = None

    @property
    def keep_seconds(self) -> float:
        """For how long to keep its chunks; 0 for no longer than others."""
        if self.keep is True:
            return KEEP_SECONDS
        return max(0.0, float(self.keep))


NO_HINTS = RequestHints()
