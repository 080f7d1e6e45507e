"""Opens the tiers of files, gives up what hangs there, and probes what was suspended."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from opal_connector.reports import RateLimitedWarnings
from opal_connector.tiers.borrowed_tier import BorrowedTier
from opal_connector.tiers.breaker import ProbeOutcome
from opal_connector.tiers.file_errors import NoSpaceError
from opal_connector.tiers.file_moves import Tier
from opal_connector.tiers.keyed_tier import KeyedTier
from opal_connector.tiers.lane import Lane
from opal_connector.transfers import InventoryPage, TierHealth

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

_WATCH_SECONDS = 0.1
_OPENING_SECONDS = 20.0  # after that lookups go on without what the directory may hold


class TierWatch:
    """The life of the tiers of one worker, apart from their jobs.

    Mutable state: which tiers are open, the pages not yet taken, the namespace; guarded by `_lock`.
    Whatever may hang runs in a thread of its own.
    """

    def __init__(self, tiers: Sequence[Tier], lanes: Sequence[Lane], *, rank: int) -> None:
        self._tiers = tiers
        self._lanes = lanes
        self._rank = rank
        self._lock = threading.Lock()
        self._is_open = [not isinstance(tier, KeyedTier) for tier in tiers]
        self._namespace = b""
        self._open_by = float("inf")
        self._pages: list[InventoryPage] = []
        self._closing = threading.Event()
        if not all(self._is_open):
            start_thread("opal-watch", self._watch)

    @property
    def health(self) -> tuple[TierHealth, ...]:
        """What every tier can do now, by place. One that takes long to open is not waited for."""
        return tuple(
            lane.health if is_open or lane.health is TierHealth.SUSPENDED else self._unopened
            for lane, is_open in zip(self._lanes, self._is_open, strict=True)
        )

    @property
    def _unopened(self) -> TierHealth:
        is_late = time.monotonic() > self._open_by
        return TierHealth.SUSPENDED if is_late else TierHealth.OPENING

    def open(self, namespace: bytes) -> None:
        """Begin to open the tiers of files. Does not block."""
        self._namespace = namespace
        self._open_by = time.monotonic() + _OPENING_SECONDS
        for place, is_open in enumerate(self._is_open):
            if not is_open:
                start_thread(f"opal-open-{place}", lambda place=place: self._open(place))  # type: ignore[misc]

    def is_open(self, place: int) -> bool:
        """Whether a tier's contents are known."""
        return self._is_open[place]

    def take_pages(self) -> list[InventoryPage]:
        """What the tiers hold, since the last call."""
        if not self._pages:
            return []
        with self._lock:
            taken, self._pages = self._pages, []
        return taken

    def close(self) -> list[threading.Thread]:
        """Have every tier closed; returns the threads that do it."""
        self._closing.set()
        return [
            start_thread(f"opal-close-{place}", lambda place=place: self._close(place))  # type: ignore[misc]
            for place in range(len(self._tiers))
        ]

    # ---- inside ----

    def _open(self, place: int) -> None:
        tier = self._tiers[place]
        assert isinstance(tier, KeyedTier)
        try:
            for names in tier.open(self._namespace):
                self._add(InventoryPage(place, self._rank, names))
        except Exception as error:  # noqa: BLE001 - the tier stays out until a probe opens it
            warnings.warn(f"open-{place}", "cannot open %s: %r", tier.name, error)
            self._lanes[place].suspend()
            return
        with self._lock:
            self._is_open[place] = True
        self._add(
            InventoryPage(
                place,
                self._rank,
                is_last=True,
                foreign_bytes=tier.foreign_bytes,
                is_borrowed=isinstance(tier, BorrowedTier),
            )
        )

    def _add(self, page: InventoryPage) -> None:
        with self._lock:
            self._pages.append(page)

    def _watch(self) -> None:
        while not self._closing.wait(_WATCH_SECONDS):
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - without it nothing would be given up again
                warnings.warn("watch", "looking after the tiers failed: %r", error)

    def _look(self) -> None:
        for place, lane in enumerate(self._lanes):
            lane.give_up_overdue()
            if isinstance(self._tiers[place], KeyedTier) and lane.begin_probe():
                start_thread(f"opal-probe-{place}", lambda place=place: self._probe(place))  # type: ignore[misc]

    def _probe(self, place: int) -> None:
        tier, lane = self._tiers[place], self._lanes[place]
        assert isinstance(tier, KeyedTier)
        try:
            if not self._is_open[place] and self._namespace:
                self._open(place)
                outcome = ProbeOutcome.OK if self._is_open[place] else ProbeOutcome.FAILED
            else:
                tier.probe()
                outcome = ProbeOutcome.OK
        except NoSpaceError:
            outcome = ProbeOutcome.NO_SPACE
        except Exception as error:  # noqa: BLE001 - whatever it is, the tier does not work
            warnings.warn(f"probe-{place}", "%s still does not work: %r", tier.name, error)
            outcome = ProbeOutcome.FAILED
        lane.end_probe(outcome)
        if outcome is ProbeOutcome.OK:
            logger.info("%s works again", tier.name)

    def _close(self, place: int) -> None:
        try:
            self._tiers[place].close()
        except Exception as error:  # noqa: BLE001 - nobody can do anything about it any more
            logger.warning("%s could not be closed: %r", self._tiers[place].name, error)


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Run something in a daemon thread, which may hang without holding up the end."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
