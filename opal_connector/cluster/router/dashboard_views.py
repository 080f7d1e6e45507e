"""What the page is told, once a second. Nothing of a prompt is in it, and no key."""

import msgspec


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one worker, or one that several share; None is what nobody has said or measured.

    `workers` are those that have it mounted. Of a shared tier, a block that several wrote counts
    for each. `used_share` is of its limit, or of the device's KV blocks.
    """

    name: str
    workers: tuple[str, ...]
    is_persistent: bool
    is_shared: bool
    blocks: int
    used_share: float | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    load_bytes_per_second: float | None = None
    store_bytes_per_second: float | None = None


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance: how it is, what the router has under way there and what the engine says.

    What the engine says (from `running` on) is None where nothing recent is known. `trust` is that
    of its least trusted worker.
    """

    name: str
    url: str
    state: str  # new, live, failing, draining or dead
    takes_requests: bool
    breaker: str
    breaker_opened: int
    models: tuple[str, ...]
    workers: tuple[str, ...]
    in_flight: int
    queued_tokens: int
    decoding_tokens: int
    trust: float | None
    resyncs: int
    running: int | None = None
    waiting: int | None = None
    device_usage: float | None = None
    prefill_tokens_per_second: float | None = None


class SourceView(msgspec.Struct, frozen=True, kw_only=True):
    """A source of events: where it stands, and how often something was wrong with it."""

    name: str
    state: str
    is_settled: bool
    workers: tuple[str, ...]
    events: int
    gaps: int
    snapshots: int
    mismatches: int
    purges: int
    restarts: int


class CandidateView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was weighed: what it had of the prompt, and what the policy made of that.

    `weighted_seconds` is what was compared; None, as all seconds, for a policy without costs.
    """

    worker: str
    device_tokens: int
    tier_tokens: dict[str, int]
    queue_seconds: float | None = None
    fetch_seconds: float | None = None
    compute_seconds: float | None = None
    decode_seconds: float | None = None
    evenness_seconds: float | None = None
    weighted_seconds: float | None = None


class DecisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was sent somewhere, and what became of it so far.

    `expected_tokens` should have been cached; None where the prompt's tokens were not known.
    `candidate_count` were weighed, the best of them are listed.
    """

    number: int
    sent_at: float  # wall time
    attempt: int
    worker: str
    reason: str
    prompt_tokens: int
    expected_tokens: int | None
    predicted_tokens: int
    cached_tokens: int | None
    status: int
    failure: str | None
    is_over: bool
    first_byte_seconds: float | None
    candidate_count: int
    candidates: tuple[CandidateView, ...]


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in some seconds.

    Tokens are prompt tokens by where their KV came from; `uncounted` requests are not among them.
    `first_byte_seconds` are those of `PERCENTS`.
    """

    seconds: float
    requests: int
    faults: int
    uncounted: int
    device_tokens: int
    tier_tokens: dict[str, int]
    unforeseen_tokens: int
    computed_tokens: int
    first_byte_seconds: tuple[float | None, ...]


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A place on the charts; `ago_seconds` is the age of its end, 0 for what is still going on."""

    ago_seconds: float
    period: Period


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on the page. `counts` are since the start, by what and by kind."""

    process: int
    at: float  # wall time
    up_seconds: float
    policy: str
    is_draining: bool
    under_way: int
    waiting: int
    max_waiting: int
    sessions: int
    index_blocks: int
    index_bytes: int
    deaths: int
    counts: dict[str, dict[str, int]]
    instances: tuple[InstanceView, ...]
    tiers: tuple[TierView, ...]
    sources: tuple[SourceView, ...]
    decisions: tuple[DecisionView, ...]  # the last one first
    last_minute: Period
    since_start: Period
    points: tuple[Point, ...]  # the oldest first
