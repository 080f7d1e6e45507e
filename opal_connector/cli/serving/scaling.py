"""Whether there are enough instances. No clock, no process: numbers in, a number out."""

import math

from opal_connector.cli.serving.schema import ScalingSettings


class Scaling:
    """Decides how many instances there should be.

    One more at a time while the queues are long, one less when they have been short for a while;
    between the two thresholds nothing changes, and nothing does soon after a change, because what
    the last change did is not to be seen yet.
    Mutable state: when something changed last, and since when there is little to do.

    Args:
        settings: The thresholds.
        least: Fewer there are never.
    """

    def __init__(self, settings: ScalingSettings, least: int) -> None:
        self._settings = settings
        self._least = least
        self._changed_at = -math.inf
        self._quiet_since: float | None = None

    def wanted(self, now: float, *, requests: int, instances: int) -> int:
        """How many there should be.

        Args:
            now: The time in seconds, from any beginning.
            requests: Those under way and those that wait.
            instances: Those that serve or will, without those that are leaving.
        """
        settings = self._settings
        is_quiet = self._has_been_quiet(now, requests, instances)
        if now - self._changed_at < settings.scale_latency:
            return instances
        wanted = instances
        if instances < self._least or requests > settings.max_queue_threshold * instances:
            wanted = min(instances + 1, max(settings.max_workers, self._least))
        elif is_quiet and instances > self._least:
            wanted = instances - 1
        if wanted == instances:
            return instances
        self._changed_at = now
        self._quiet_since = None
        return wanted

    def _has_been_quiet(self, now: float, requests: int, instances: int) -> bool:
        """Whether one less would have been enough for long, with room to spare."""
        settings = self._settings
        enough = settings.scale_in_share * settings.max_queue_threshold * (instances - 1)
        if requests > enough:
            self._quiet_since = None
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        return now - self._quiet_since >= settings.quiet_seconds
