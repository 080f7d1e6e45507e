"""What the router remembers of its last requests for whoever looks at its page: bounded, cheap."""

import bisect
import math
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Final

import msgspec

from opal_connector.cluster.policies import CostTerms
from opal_connector.cluster.request import WorkerMatch
from opal_connector.cluster.router.decide import RouteDecision

SLOT_SECONDS: Final = 5.0
SLOT_COUNT: Final = 60
KEPT_REQUESTS: Final = 40
TIERS_LIMIT: Final = 32  # names come from instances: what is more goes together
OTHER_TIERS: Final = "others"
CANCELLED: Final = "cancelled"  # the failure of nobody: the client went away, or the router ended
PERCENTS: Final = (50, 90, 99)
_STEP: Final = 1.04  # times between are told apart to 4 %
_LOG_STEP: Final = math.log(_STEP)
_SHORTEST_SECONDS: Final = 1e-6
_FIRST_FAULT: Final = 500


class SentRequest(msgspec.Struct, gc=False):
    """One attempt at one instance: what was decided, and, as it comes, what became of it.

    Nothing of the prompt is in it. `status` is 0 until an answer begins; `cached_tokens` is None
    where the engine did not say; `failure` names what broke.
    """

    number: int
    sent_at: float  # monotonic
    attempt: int
    worker_id: str
    reason: str
    prompt_tokens: int
    expected_tokens: int
    predicted_tokens: int
    is_known: bool  # whether the tokens were, and so what to expect
    matches: dict[str, WorkerMatch]
    costs: dict[str, CostTerms]
    status: int = 0
    first_byte_seconds: float | None = None
    cached_tokens: int | None = None
    failure: str | None = None
    is_over: bool = False


class TokenSums(msgspec.Struct):
    """Prompt tokens by where their KV came from, of requests whose engine said what it had.

    The engine says how much was cached; what the index had seen where says from where.
    `unforeseen` were cached, and the index did not know.
    """

    device: int = 0
    tiers: dict[str, int] = msgspec.field(default_factory=dict)
    unforeseen: int = 0
    computed: int = 0

    def see(self, request: SentRequest, cached_tokens: int) -> None:
        """One more request."""
        left = min(cached_tokens, request.prompt_tokens)
        self.computed += request.prompt_tokens - left
        match = request.matches.get(request.worker_id)
        if match is not None:
            device = min(left, match.device_tokens)
            self.device += device
            left -= device
            for tier, tokens in match.tier_tokens.items():
                taken = min(left, tokens)
                left -= taken
                self._of_tier(tier, taken)
        self.unforeseen += left

    def add(self, other: "TokenSums") -> None:
        """All of another sum."""
        self.device += other.device
        self.unforeseen += other.unforeseen
        self.computed += other.computed
        for tier, tokens in other.tiers.items():
            self._of_tier(tier, tokens)

    def _of_tier(self, tier: str, tokens: int) -> None:
        tiers = self.tiers
        if tier not in tiers and len(tiers) >= TIERS_LIMIT:
            tier = OTHER_TIERS
        tiers[tier] = tiers.get(tier, 0) + tokens


class Times:
    """How often a time was seen, to a few percent.

    Mutable state: the counts by magnitude, and what was computed of them, until one changes.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._percentiles: tuple[float | None, ...] | None = None

    def see(self, seconds: float) -> None:
        """One more."""
        magnitude = round(math.log(max(seconds, _SHORTEST_SECONDS)) / _LOG_STEP)
        self._counts[magnitude] = self._counts.get(magnitude, 0) + 1
        self._percentiles = None

    def add(self, other: "Times") -> None:
        """All of another's."""
        for magnitude, count in other._counts.items():
            self._counts[magnitude] = self._counts.get(magnitude, 0) + count
        self._percentiles = None

    def percentiles(self) -> tuple[float | None, ...]:
        """The times that `PERCENTS` of all did not exceed; None without any."""
        if self._percentiles is None:
            self._percentiles = self._compute()
        return self._percentiles

    def _compute(self) -> tuple[float | None, ...]:
        magnitudes = sorted(self._counts)
        if not magnitudes:
            return (None,) * len(PERCENTS)
        upto = list(accumulate(self._counts[magnitude] for magnitude in magnitudes))
        places = (bisect.bisect_left(upto, upto[-1] * percent / 100) for percent in PERCENTS)
        return tuple(_STEP ** magnitudes[place] for place in places)


class Slot(msgspec.Struct):
    """What happened in a few seconds, or since the start. `requests` are attempts that ended."""

    number: int = 0
    requests: int = 0
    faults: int = 0
    uncounted: int = 0  # no engine said what it had, or the tokens were not known
    tokens: TokenSums = msgspec.field(default_factory=TokenSums)
    first_bytes: Times = msgspec.field(default_factory=Times)

    def add(self, other: "Slot") -> None:
        """All of another one's."""
        self.requests += other.requests
        self.faults += other.faults
        self.uncounted += other.uncounted
        self.tokens.add(other.tokens)
        self.first_bytes.add(other.first_bytes)

    def end(self, request: SentRequest) -> None:
        """A request that is over."""
        self.requests += 1
        failed = request.failure is not None and request.failure != CANCELLED
        self.faults += failed or request.status >= _FIRST_FAULT
        if request.is_known and request.cached_tokens is not None:
            self.tokens.see(request, request.cached_tokens)
        else:
            self.uncounted += 1


class RecentRequests:
    """The last requests, and what happened lately in slots of a few seconds.

    Mutable state: both rings, the sums of the slots that are over, the next number. The loop's
    thread alone uses it.
    """

    def __init__(self) -> None:
        self.began_at: float = time.monotonic()
        self.requests: deque[SentRequest] = deque(maxlen=KEPT_REQUESTS)
        self.slots: deque[Slot] = deque(maxlen=SLOT_COUNT)
        self._ended = Slot()
        self._last_number = 0
        self.on_end: Callable[[SentRequest], None] = lambda _: None

    def begin(self, decision: RouteDecision, attempt: int) -> SentRequest:
        """A request is sent; `attempt` counts from 1."""
        self._last_number += 1
        request = SentRequest(
            self._last_number,
            time.monotonic(),
            attempt,
            decision.worker_id,
            decision.reason,
            decision.prompt_tokens,
            decision.expected_tokens,
            decision.predicted_tokens,
            bool(decision.prefixes),
            decision.matches,
            decision.costs,
        )
        self.requests.append(request)
        return request

    def first_byte(self, request: SentRequest, status: int, seconds: float) -> None:
        """Its answer begins, so long after the request came."""
        request.status = status
        request.first_byte_seconds = seconds
        self._slot(time.monotonic()).first_bytes.see(seconds)

    def end(self, request: SentRequest, status: int) -> None:
        """It is over, with or without an answer."""
        request.status = status
        request.is_over = True
        self._slot(time.monotonic()).end(request)
        self.on_end(request)

    def add(self, request: SentRequest) -> None:
        """One that another process of this router sent, and that is over."""
        self._last_number += 1
        request.number = self._last_number
        self.requests.append(request)
        slot = self._slot(time.monotonic())
        if request.first_byte_seconds is not None:
            slot.first_bytes.see(request.first_byte_seconds)
        slot.end(request)

    def total(self) -> Slot:
        """The sums since the start."""
        found = Slot()
        found.add(self._ended)
        if self.slots:
            found.add(self.slots[-1])
        return found

    def last(self, seconds: float, now: float) -> Slot:
        """The sums of so many seconds, as far as they are kept, without a slot partly older."""
        found = Slot()
        oldest = math.floor((now - seconds) / SLOT_SECONDS)
        for slot in self.slots:
            if slot.number > oldest:
                found.add(slot)
        return found

    def _slot(self, now: float) -> Slot:
        number = int(now / SLOT_SECONDS)
        slots = self.slots
        if not slots or slots[-1].number != number:
            if slots:
                self._ended.add(slots[-1])
            slots.append(Slot(number))
        return slots[-1]
