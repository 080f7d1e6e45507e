"""What the scheduler half remembers about one vLLM request."""

from concurrent.futures import Future

from vllm.v1.request import Request

from opal_connector.managers import OpalRequest

IDENTITY_WAIT_SECONDS = 1.0  # how long a request may wait for its adapter to be read


class RequestTracker:
    """One vLLM request on its way through the scheduler.

    Mutable state: everything below; used by the engine core's thread only.

    Attributes:
        opal: The books' view; None while the identity is unknown or if it cannot be cached.
        lora_fingerprint: The adapter's fingerprint being read, None without an adapter.
        asked_at: When the identity was first missing (monotonic seconds).
        computed_blocks: Of the last lookup; a load begins behind them.
        may_load: Whether lookups are worth while: not after a load that could not be planned.
        lookup_tokens: Tokens asked for by a lookup that the host has not acted on, else None.
        sure_tokens: Tokens whose KV is complete at the end of the last planned step.
        planned_chunks: Whole chunks for which stores were planned.
        has_planned_tail: Whether the prompt's tail was planned.
    """

    __slots__ = (
        "asked_at",
        "computed_blocks",
        "has_planned_tail",
        "lookup_tokens",
        "lora_fingerprint",
        "may_load",
        "opal",
        "planned_chunks",
        "request",
        "sure_tokens",
        "tier_tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.opal: OpalRequest | None = None
        self.lora_fingerprint: Future[str] | None = None
        self.asked_at: float | None = None
        self.computed_blocks = 0
        self.may_load = True
        self.lookup_tokens: int | None = None
        self.tier_tokens: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget progress that a preemption undid; what is stored stays stored."""
        self.sure_tokens = 0
        self.planned_chunks = 0
        self.has_planned_tail = False
        if self.opal is not None:
            self.opal.store_again()
