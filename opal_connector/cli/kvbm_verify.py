"""Compares what was learned from events with what the instances really hold, block by block."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from opal_connector.cli.kvbm_client import Held, InstanceClient, NoAnswerError
from opal_connector.cli.kvbm_following import Following
from opal_connector.cluster.ingest.sources import SourceStatus
from opal_connector.cluster.ingest.states import SourceState
from opal_connector.cluster.kvbm import KVBM

HASHES_SHOWN: Final = 5
STILL_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = 0.25  # longer than an event waits in an instance before it is published
_ATTEMPTS: Final = 20
_DIFFERING_ATTEMPTS: Final = 3  # a difference that stays is one


class PlaceReport(msgspec.Struct):
    """One group in one tier: what it holds, what is not known of it, what is known wrongly."""

    group: int
    tier: str
    blocks: int
    missing: int
    phantom: int
    missing_hashes: list[str]
    phantom_hashes: list[str]


class InstanceReport(msgspec.Struct):
    """One source; `reason` says why it could not be compared, and is empty where it was."""

    source: str
    instance_id: str
    reason: str = ""
    incarnation: int = 0
    sequence: int = -1
    places: list[PlaceReport] = []

    @property
    def differences(self) -> int:
        """Blocks that are missing or phantom."""
        return sum(place.missing + place.phantom for place in self.places)


class VerifyReport(msgspec.Struct):
    """The whole comparison. `sources` are the states and counters while following."""

    differences: int
    not_compared: int
    followed_seconds: float
    instances: list[InstanceReport]
    sources: list[dict[str, Any]]


async def await_quiet(
    following: Following, seconds: float, clock: Callable[[], float] = time.monotonic
) -> None:
    """Until every source is settled and has applied nothing new for a second, or for so long."""
    deadline = clock() + seconds
    seen: list[tuple[str, int | None, bool]] = []
    since = clock()
    while clock() < deadline:
        now = [(one.name, one.applied, one.is_settled) for one in following.sources()]
        if now != seen or not all(is_settled for *_, is_settled in now):
            seen, since = now, clock()
        elif clock() - since >= STILL_SECONDS:
            return
        await asyncio.sleep(_POLL_SECONDS)


async def verify(following: Following, followed_seconds: float) -> VerifyReport:
    """Compares every source with its instance; following goes on meanwhile."""
    reports = [await _compare(following, one.name) for one in following.sources()]
    return VerifyReport(
        differences=sum(report.differences for report in reports),
        not_compared=sum(bool(report.reason) for report in reports),
        followed_seconds=round(followed_seconds, 3),
        instances=reports,
        sources=[msgspec.to_builtins(one) for one in following.sources()],
    )


async def _compare(following: Following, name: str) -> InstanceReport:
    source = _status(following, name)
    report = InstanceReport(name, ", ".join(source.worker_ids) or "unknown")
    if not source.is_native:
        report.reason = "a plain vLLM engine cannot be asked what it holds"
        return report
    differing = 0
    try:
        with InstanceClient(source.endpoint) as client:
            for _ in range(_ATTEMPTS):
                report = await _attempt(following, name, client)
                differing += bool(report.differences)
                if differing == _DIFFERING_ATTEMPTS or not (report.reason or report.differences):
                    break
                await asyncio.sleep(_PAUSE_SECONDS)
    except NoAnswerError as error:
        report.reason = str(error).rstrip(".")
    return report


async def _attempt(following: Following, name: str, client: InstanceClient) -> InstanceReport:
    """Fetches everything between two equal sequence numbers, and compares if that worked."""
    worker_id = (await client.description()).instance.instance_id
    before = await client.digests()
    places = [(digest.group, digest.tier) for digest in before.digests]
    held = {place: await client.contents(*place) for place in places}
    # What an instance holds may be ahead of what it has published: then a batch comes now.
    await asyncio.sleep(_PAUSE_SECONDS)
    after = await client.digests()
    report = InstanceReport(name, worker_id, "", after.incarnation, after.sequence)
    if (before.incarnation, before.sequence) != (after.incarnation, after.sequence):
        report.reason = "its events went on, so that there was no moment to compare"
        return report
    report.reason = _obstacle(following, _status(following, name), report, held)
    if not report.reason:
        # What it does not have at all must not be known either.
        known = following.kvbm.workers[worker_id].block_counts
        nothing = {place: set[bytes]() for place in known}
        blocks = nothing | {place: one.blocks for place, one in held.items()}
        report.places = [
            _compared(following.kvbm, worker_id, place, one) for place, one in blocks.items()
        ]
    return report


def _obstacle(
    following: Following,
    source: SourceStatus,
    report: InstanceReport,
    held: Mapping[tuple[int, str], Held],
) -> str:
    """Why what is known and what is held cannot be compared now, or nothing."""
    state = following.kvbm.workers.get(report.instance_id)
    unfinished = [tier for (_, tier), one in held.items() if not one.is_complete]
    if state is None:
        return f"its source is {source.state} and has not heard of it"
    if source.state is not SourceState.LIVE:
        return f"its source is {source.state}"
    if state.description.incarnation != report.incarnation:
        return "it has started anew and is not known yet"
    if source.applied != report.sequence:
        return f"its batch {report.sequence} was not taken in, only batch {source.applied}"
    if unfinished:
        return f"it is still finding out what is in {', '.join(unfinished)}"
    if state.refused_blocks:
        return f"{state.refused_blocks:,} of its blocks found no room in the index"
    return ""


def _status(following: Following, name: str) -> SourceStatus:
    return next(one for one in following.sources() if one.name == name)


def _compared(kvbm: KVBM, worker_id: str, place: tuple[int, str], held: set[bytes]) -> PlaceReport:
    known = {block for _, block in kvbm.contents(worker_id, *place)}
    missing, phantom = sorted(held - known), sorted(known - held)
    return PlaceReport(
        *place,
        blocks=len(held),
        missing=len(missing),
        phantom=len(phantom),
        missing_hashes=[block.hex() for block in missing[:HASHES_SHOWN]],
        phantom_hashes=[block.hex() for block in phantom[:HASHES_SHOWN]],
    )
