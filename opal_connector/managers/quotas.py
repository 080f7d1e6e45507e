"""How much of a tier each tenant may fill. A tenant is a cache_salt."""

from collections.abc import Mapping

EVERYBODY_ELSE = "*"
NOBODY = ""  # requests without a salt, and what was there before the start


class Quotas:
    """Shares of a tier's capacity by owner. Holds no state but the settings."""

    def __init__(self, shares: Mapping[str, float] | None = None) -> None:
        self._shares = dict(shares or {})

    def __bool__(self) -> bool:
        """Whether owners have to be told apart."""
        return bool(self._shares)

    def owner(self, cache_salt: str | None) -> str:
        """The owner that an object of a request with this salt has."""
        return cache_salt or NOBODY if self._shares else NOBODY

    def limit_bytes(self, owner: str, capacity_bytes: int) -> int:
        """What an owner may have of a tier; all of it where nothing is said."""
        share = self._shares.get(owner)
        if share is None:
            share = 1.0 if owner == NOBODY else self._shares.get(EVERYBODY_ELSE, 1.0)
        return int(share * capacity_bytes)
