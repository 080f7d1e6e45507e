"""How long to wait before an engine that has ended is started again. No clock, no process."""

import random

from opal_connector.cli.serving.schema import RestartSettings


class Backoff:
    """Waits that double, with jitter, until it has run well.

    Mutable state: the failures in a row.
    """

    def __init__(self, settings: RestartSettings, seed: int | None = None) -> None:
        self._settings = settings
        self._random = random.Random(seed)
        self.failures = 0

    def next_wait(self, served_seconds: float) -> float | None:
        """It has ended after serving for so long: the seconds to wait, or None to give up."""
        settings = self._settings
        if served_seconds >= settings.well_seconds:
            self.failures = 0
        self.failures += 1
        if settings.limit is not None and self.failures > settings.limit:
            return None
        doublings = min(self.failures - 1, 60)  # enough for any limit, and no number too large
        wait = min(settings.longest_seconds, settings.first_seconds * 2.0**doublings)
        return wait * (1 + self._random.uniform(-settings.jitter, settings.jitter))
