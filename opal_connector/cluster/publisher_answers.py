"""Answers to questions about an instance, part by part."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Final

from opal_connector.cluster.channel_facts import blocks_of_fact, facts_of_blocks
from opal_connector.cluster.publisher_sources import DeviceSource, InstanceSource
from opal_connector.cluster.publisher_stream import EventStream
from opal_connector.events import DEVICE_TIER, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskDescription,
    AskDigests,
    AskReplay,
    Contents,
    Description,
    Digests,
    DigestsNow,
    InstanceDescription,
    Question,
    Refused,
    Replay,
    Reply,
    encode_message,
)

PART_BYTES: Final = 128 << 10
_FACT_OVERHEAD_BYTES: Final = 48
_FACTS_AT_ONCE: Final = 1_024  # looked at before others get their turn
_REPLAY_BATCHES: Final = 1_024


class Answers:
    """Says what the stream and the books know. Used by the publisher's thread.

    Mutable state: the last description and how often it has changed.
    """

    def __init__(
        self,
        stream: EventStream,
        source: InstanceSource,
        device: DeviceSource | None,
        *,
        publish_endpoint: str,
        heartbeat_seconds: float,
    ) -> None:
        self._stream = stream
        self._source = source
        self._device = device
        self._publish_endpoint = publish_endpoint
        self._heartbeat_seconds = heartbeat_seconds
        self._described: InstanceDescription | None = None
        self._revision = 0

    def revision(self) -> int:
        """How often the description has changed."""
        return self._describe()[1]

    def digests(self) -> Digests:
        """The digests of all tiers after the last batch."""
        for group, tier in self._source.places:
            self._stream.holding(group, tier)
        return self._stream.digests(self._is_complete)

    def parts(self, question: Question) -> Iterator[bytes | None]:
        """The encoded parts of an answer; None where it is somebody else's turn."""
        match question:
            case AskDescription(_, request_id):
                instance, revision = self._describe()
                yield encode_message(
                    Description(
                        FORMAT_VERSION,
                        request_id,
                        instance,
                        self._publish_endpoint,
                        self._heartbeat_seconds,
                        revision,
                        self._stream.sequence,
                    )
                )
            case AskReplay(_, request_id, first_sequence):
                yield from self._replay(request_id, first_sequence)
            case AskDigests(_, request_id):
                yield encode_message(
                    DigestsNow(
                        FORMAT_VERSION,
                        request_id,
                        self._stream.incarnation,
                        self._stream.sequence,
                        self.digests(),
                    )
                )
            case AskContents():
                yield from self._contents(question)

    # ---- inside ----

    def _describe(self) -> tuple[InstanceDescription, int]:
        stream = self._stream
        now = self._source.describe(stream.instance_id, stream.incarnation)
        if now != self._described:
            self._revision += self._described is not None
            self._described = now
        return now, self._revision

    def _is_complete(self, tier: str) -> bool:
        if tier == DEVICE_TIER:
            return self._device is None or self._device.is_complete
        return self._source.is_complete(tier)

    def _replay(self, request_id: int, first_sequence: int) -> Iterator[bytes]:
        incarnation = self._stream.incarnation
        batches: list[bytes] = []
        size_bytes = 0
        numbers = count()

        def part(*, is_last: bool) -> bytes:
            number = next(numbers)
            return encode_message(
                Replay(FORMAT_VERSION, request_id, incarnation, tuple(batches), is_last, number)
            )

        for batch in self._stream.since(first_sequence):
            if batches and (
                size_bytes + len(batch) > PART_BYTES or len(batches) >= _REPLAY_BATCHES
            ):
                yield part(is_last=False)
                batches.clear()
                size_bytes = 0
            batches.append(batch)
            size_bytes += len(batch)
        yield part(is_last=True)

    def _contents(self, question: AskContents) -> Iterator[bytes | None]:
        stream = self._stream
        # Before anything is listed: what happens from here on has a higher number.
        incarnation, sequence = stream.incarnation, stream.sequence
        if not self._has(question.group, question.tier):
            reason = f"this instance has no tier {question.tier!r} of group {question.group}"
            yield refusal(question.request_id, reason)
            return
        is_complete = self._is_complete(question.tier)
        listed = self._list(question.group, question.tier)
        buckets = frozenset(question.buckets)
        facts: list[ObjectFact] = []
        size_bytes = 0
        numbers = count()

        def part(*, is_last: bool) -> bytes:
            return encode_message(
                Contents(
                    FORMAT_VERSION,
                    question.request_id,
                    incarnation,
                    sequence,
                    tuple(facts),
                    is_last,
                    is_complete,
                    next(numbers),
                )
            )

        for looked_at, fact in enumerate(listed, 1):
            for wanted in blocks_of_fact(fact, buckets) if buckets else (fact,):
                facts.append(wanted)
                size_bytes += len(wanted.block_hashes) + _FACT_OVERHEAD_BYTES
            if size_bytes >= PART_BYTES:
                yield part(is_last=False)
                facts.clear()
                size_bytes = 0
            elif looked_at % _FACTS_AT_ONCE == 0:
                yield None
        yield part(is_last=True)

    def _has(self, group: int, tier: str) -> bool:
        if tier == DEVICE_TIER and self._device is not None:
            return True
        return (group, tier) in self._source.places

    def _list(self, group: int, tier: str) -> Iterable[ObjectFact]:
        if tier == DEVICE_TIER and self._device is not None:
            return facts_of_blocks(group, self._device.held(group))
        return self._source.list_facts(group, tier)


def refusal(request_id: int, reason: str) -> bytes:
    """The answer to a question that has none."""
    reply: Reply = Refused(FORMAT_VERSION, request_id, reason)
    return encode_message(reply)
