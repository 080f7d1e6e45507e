"""From the router's books to what its page is told, when somebody asks. It keeps nothing."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

import msgspec

from opal_connector.cluster.router.core import RouterCore
from opal_connector.cluster.router.dashboard_rings import (
    SLOT_COUNT,
    SLOT_SECONDS,
    SentRequest,
    Slot,
)
from opal_connector.cluster.router.dashboard_views import (
    CandidateView,
    DecisionView,
    InstanceView,
    Period,
    Point,
    Snapshot,
    SourceView,
    TierView,
)
from opal_connector.cluster.router.instances import Health, Instance
from opal_connector.cluster.worker_state import OpalWorkerState
from opal_connector.events import DEVICE_TIER
from opal_connector.events.channel import SystemEvent, TierDescription, TierLoad

MINUTE_SECONDS: Final = 60.0
CANDIDATES_LIMIT: Final = 12
_EVENTS: Final = {
    "answer": "answers",
    "retry": "retries",
    "broken": "broken",
    "truncated": "truncated",
    "tokens": "prompts",
}


def snapshot(core: RouterCore) -> Snapshot:
    """All of it, as it is now."""
    now = time.monotonic()
    recent, index, router = core.forwarder.recent, core.index, core.router
    up_seconds = now - recent.began_at
    last_seconds = min(MINUTE_SECONDS, up_seconds)
    systems = _systems(core)
    return Snapshot(
        process=os.getpid(),
        at=time.time(),
        up_seconds=up_seconds,
        policy=router.policy_name,
        is_draining=core.admission.is_draining,
        under_way=core.forwarder.under_way + sum(map(core.fleet.elsewhere, core.fleet)),
        waiting=core.admission.waiting,
        max_waiting=core.config.queue.max_queue,
        sessions=len(router.sessions),
        index_blocks=index.entry_count,
        index_bytes=index.used_bytes,
        deaths=core.deaths,
        counts=_counts(core),
        instances=tuple(_instance(core, one, now, systems) for one in core.fleet),
        tiers=tuple(tiers(index.workers, systems)),
        sources=tuple(_sources(core)),
        decisions=tuple(_decisions(core, now)),
        last_minute=_period(recent.last(MINUTE_SECONDS, now), last_seconds),
        since_start=_period(recent.total(), up_seconds),
        points=tuple(_points(recent.slots, now)),
    )


def _counts(core: RouterCore) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {name: {} for name in _EVENTS.values()}
    for (event, detail), count in core.forwarder.counts.items():
        counts.setdefault(_EVENTS.get(event, event), {})[detail] = count
    counts["refused"] = dict(core.admission.counts)
    reasons = counts["reasons"] = {}
    for (reason, _), count in core.admission.reasons.items():
        reasons[reason] = reasons.get(reason, 0) + count
    return counts


# ---- instances ----


def _systems(core: RouterCore) -> dict[str, SystemEvent]:
    """What workers say of themselves, of those that can be believed: that are alive and heard."""
    dead = {
        worker_id
        for instance in core.fleet
        if instance.health is Health.DEAD
        for worker_id in instance.worker_ids
    }
    return {
        worker_id: state.system
        for worker_id, state in core.index.workers.items()
        if state.is_live and state.system is not None and worker_id not in dead
    }


def _instance(
    core: RouterCore, instance: Instance, now: float, all_systems: Mapping[str, SystemEvent]
) -> InstanceView:
    loads = [core.router.loads.load(worker_id) for worker_id in instance.worker_ids]
    audits = [
        core.audit.workers[worker_id]
        for worker_id in instance.worker_ids
        if worker_id in core.audit.workers
    ]
    systems = [
        all_systems[worker_id] for worker_id in instance.worker_ids if worker_id in all_systems
    ]
    rates = [one.prefill_tokens_per_second for one in systems if one.prefill_tokens_per_second]
    return InstanceView(
        name=instance.name,
        url=instance.config.url,
        state=_state(instance),
        takes_requests=instance.is_well(now),
        breaker=instance.breaker.state(now).value,
        breaker_opened=instance.breaker.opened,
        models=tuple(sorted(instance.models)),
        workers=instance.worker_ids,
        in_flight=instance.in_flight + core.fleet.elsewhere(instance),
        queued_tokens=sum(load.queued_tokens for load in loads),
        decoding_tokens=sum(load.decoding_tokens for load in loads),
        trust=min((found.trust for found in audits), default=None),
        resyncs=sum(found.resyncs for found in audits),
        running=sum(one.running for one in systems) if systems else None,
        waiting=sum(one.waiting for one in systems) if systems else None,
        device_usage=max((one.device_usage for one in systems), default=None),
        prefill_tokens_per_second=sum(rates) if rates else None,
    )


def _state(instance: Instance) -> str:
    if instance.health is Health.DEAD:
        return "dead"
    if instance.is_draining:
        return "draining"
    return "live" if instance.health is Health.UP else instance.health.value


def _sources(core: RouterCore) -> Iterator[SourceView]:
    for status in core.sources.feed.statuses():
        metrics = status.metrics
        yield SourceView(
            name=status.name,
            state=status.state.value,
            is_settled=status.is_settled,
            workers=status.worker_ids,
            events=metrics.events,
            gaps=metrics.gaps,
            snapshots=metrics.snapshots,
            mismatches=metrics.digest_mismatches,
            purges=metrics.purges,
            restarts=metrics.restarts,
        )


# ---- tiers ----


def tiers(
    workers: Mapping[str, OpalWorkerState], systems: Mapping[str, SystemEvent]
) -> Iterator[TierView]:
    """The tiers of all workers, the device among them; each shared one once."""
    shared: dict[tuple[str, str], TierView] = {}
    for worker_id, state in sorted(workers.items()):
        for tier, view in _tiers_of(worker_id, state, systems.get(worker_id)):
            if not tier.shared_id:
                yield view
                continue
            key = (tier.name, tier.shared_id)
            shared[key] = _merged(shared[key], view) if key in shared else view
    yield from shared.values()


def _tiers_of(
    worker_id: str, state: OpalWorkerState, system: SystemEvent | None
) -> Iterator[tuple[TierDescription, TierView]]:
    """Those that hold something, and those that were described."""
    blocks: dict[str, int] = {}
    for (_, name), place in state.places.items():
        blocks[name] = blocks.get(name, 0) + place.block_count
    described = [tier.name for tier in state.description.tiers]
    heard = [name for name in blocks if name not in described]
    loads = {load.tier: load for load in (system.tiers if system is not None else ())}
    for name in [*heard, *described]:
        tier, load = state.tier(name), loads.get(name, TierLoad(name, 0, 0))
        share = load.used_bytes / load.capacity_bytes if load.capacity_bytes else None
        if name == DEVICE_TIER and system is not None:
            share = system.device_usage
        yield (
            tier,
            TierView(
                name=name,
                workers=(worker_id,),
                is_persistent=tier.is_persistent,
                is_shared=bool(tier.shared_id),
                blocks=blocks.get(name, 0),
                used_share=share,
                used_bytes=load.used_bytes if load.capacity_bytes else None,
                capacity_bytes=load.capacity_bytes or None,
                load_bytes_per_second=_speed(load.load_seconds_per_byte),
                store_bytes_per_second=_speed(load.store_seconds_per_byte),
            ),
        )


def _speed(seconds_per_byte: float | None) -> float | None:
    return 1 / seconds_per_byte if seconds_per_byte else None


def _merged(one: TierView, other: TierView) -> TierView:
    """One shared tier as two workers see it: the fuller view of the two, the faster speed."""
    return msgspec.structs.replace(
        one,
        workers=one.workers + other.workers,
        blocks=one.blocks + other.blocks,
        used_share=_most(one.used_share, other.used_share),
        used_bytes=_most(one.used_bytes, other.used_bytes),
        capacity_bytes=_most(one.capacity_bytes, other.capacity_bytes),
        load_bytes_per_second=_most(one.load_bytes_per_second, other.load_bytes_per_second),
        store_bytes_per_second=_most(one.store_bytes_per_second, other.store_bytes_per_second),
    )


_Number = TypeVar("_Number", int, float)


def _most(one: _Number | None, other: _Number | None) -> _Number | None:
    return max((value for value in (one, other) if value is not None), default=None)


# ---- requests ----


def _decisions(core: RouterCore, now: float) -> Iterator[DecisionView]:
    wall = time.time() - now
    weight = core.config.balanced.work_weight
    for sent in reversed(core.forwarder.recent.requests):
        yield DecisionView(
            number=sent.number,
            sent_at=wall + sent.sent_at,
            attempt=sent.attempt,
            worker=sent.worker_id,
            reason=sent.reason,
            prompt_tokens=sent.prompt_tokens,
            expected_tokens=sent.expected_tokens if sent.is_known else None,
            predicted_tokens=sent.predicted_tokens,
            cached_tokens=sent.cached_tokens,
            status=sent.status,
            failure=sent.failure,
            is_over=sent.is_over,
            first_byte_seconds=sent.first_byte_seconds,
            candidate_count=len(sent.matches),
            candidates=_candidates(sent, weight),
        )


def _candidates(sent: SentRequest, work_weight: float) -> tuple[CandidateView, ...]:
    """The chosen one, and the cheapest or those that have most of the prompt."""
    found = [_candidate(sent, worker_id, work_weight) for worker_id in sent.matches]

    def rank(view: CandidateView) -> tuple[bool, float, int]:
        tokens = view.device_tokens + sum(view.tier_tokens.values())
        return view.worker != sent.worker_id, view.weighted_seconds or 0.0, -tokens

    return tuple(sorted(found, key=rank)[:CANDIDATES_LIMIT])


def _candidate(sent: SentRequest, worker_id: str, work_weight: float) -> CandidateView:
    match, cost = sent.matches[worker_id], sent.costs.get(worker_id)
    view = CandidateView(
        worker=worker_id, device_tokens=match.device_tokens, tier_tokens=match.tier_tokens
    )
    if cost is None:
        return view
    return msgspec.structs.replace(
        view,
        **msgspec.structs.asdict(cost),
        weighted_seconds=cost.weighted_seconds(work_weight),
    )


def _points(slots: Iterable[Slot], now: float) -> Iterator[Point]:
    """All places of the charts, those without a request too."""
    known = {slot.number: slot for slot in slots}
    last = int(now / SLOT_SECONDS)
    for number in range(last - SLOT_COUNT + 1, last + 1):
        ago_seconds = max(0.0, now - (number + 1) * SLOT_SECONDS)
        seconds = SLOT_SECONDS if number < last else now - last * SLOT_SECONDS
        yield Point(
            ago_seconds=ago_seconds, period=_period(known.get(number, Slot(number)), seconds)
        )


def _period(slot: Slot, seconds: float) -> Period:
    tokens = slot.tokens
    return Period(
        seconds=seconds,
        requests=slot.requests,
        faults=slot.faults,
        uncounted=slot.uncounted,
        device_tokens=tokens.device,
        tier_tokens=tokens.tiers,
        unforeseen_tokens=tokens.unforeseen,
        computed_tokens=tokens.computed,
        first_byte_seconds=slot.first_bytes.percentiles(),
    )
