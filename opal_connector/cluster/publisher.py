"""Publishes the facts of one instance, and answers whoever asks about them.

Everything happens in one daemon thread. Whoever has facts appends them to a deque: that costs less
than a tenth of a microsecond, and is all that the engine ever does for the channel.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from opal_connector.cluster.curve import CurveServer
from opal_connector.cluster.publisher_answers import Answers, refusal
from opal_connector.cluster.publisher_sockets import ChannelSockets, open_sockets
from opal_connector.cluster.publisher_sources import DeviceSource, InstanceSource
from opal_connector.cluster.publisher_stream import EventStream
from opal_connector.config import Endpoint
from opal_connector.events import DEVICE_TIER, KVCEvent
from opal_connector.events.channel import (
    FORMAT_VERSION,
    Heartbeat,
    MessageError,
    decode_question,
    encode_message,
)
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)
warnings = RateLimitedWarnings(logger)

TOPIC: Final = b"opal1"
READY_SECONDS: Final = 10.0  # that the channel waits for a description
_INBOX_EVENTS: Final = 1 << 20  # beyond half of it this thread was starved
_EVENTS_AT_ONCE: Final = 256  # between two looks at the inbox
_EVENTS_PER_TURN: Final = 16_384  # before questions get theirs
_QUESTIONS_AT_ONCE: Final = 16
_OPEN_ANSWERS: Final = 64
_ANSWER_SECONDS: Final = 30.0  # without progress
_WAIT_SECONDS: Final = 0.1  # how long a close may take to be noticed
_SHORTEST_SECONDS: Final = 0.002
_BREATH_SECONDS: Final = 0.0001  # in which the engine gets the interpreter, if it waits for it
_ANEW_SECONDS: Final = 5.0
_BIND_AGAIN_SECONDS: Final = 0.5


class ChannelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an instance publishes. Without `instance_id` it is the host's name and the port."""

    endpoint: Endpoint
    publish_endpoint: Endpoint | None = None
    instance_id: str | None = None
    id_suffix: str = ""
    coalesce_seconds: float = 0.05
    heartbeat_seconds: float = 1.0
    replay_bytes: int = 64 << 20
    inbox_events: int = _INBOX_EVENTS
    curve: CurveServer | None = None


class _OpenAnswer:
    """An answer on its way: who asked, the rest of it, the part that was not taken yet."""

    __slots__ = ("deadline", "identity", "part", "parts", "request_id")

    def __init__(self, identity: bytes, request_id: int, parts: Iterator[bytes | None]) -> None:
        self.identity = identity
        self.request_id = request_id
        self.parts = parts
        self.part: bytes | None = None
        self.deadline = time.monotonic() + _ANSWER_SECONDS


class Publisher:
    """The event channel of one instance.

    Mutable state: the two inboxes, which others append to and only the thread takes from; the
    rest is the thread's own. An inbox that overflows is emptied, and a new incarnation begins whose
    fingerprints come from the books: nothing is silently wrong.
    """

    def __init__(
        self,
        settings: ChannelSettings,
        source: InstanceSource,
        device: DeviceSource | None = None,
        *,
        detach: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._source = source
        self._device = device
        self._detach = detach
        self._inbox: deque[KVCEvent] = deque(maxlen=settings.inbox_events)
        self._device_inbox: deque[Any] = deque(maxlen=settings.inbox_events)
        self._answers: deque[_OpenAnswer] = deque()
        self._is_closing = threading.Event()
        self._begin_anew_at: float | None = None
        self._settle_after: int | None = None
        self.hear = self._inbox.append
        self.hear_device = self._device_inbox.append
        self.endpoint: Endpoint | None = None  # once bound
        self.publish_endpoint: Endpoint | None = None
        self._thread = threading.Thread(target=self._run, name="opal-events", daemon=True)

    def start(self) -> None:
        """Begin, in the background."""
        self._thread.start()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Publish what is left and end."""
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def _is_whole(self) -> bool:
        """Whether the fingerprints are those of the last batch."""
        return self._settle_after is None and self._begin_anew_at is None

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._await_description()
            with contextlib.ExitStack() as stack:
                opened = self._open(stack)
                if opened is not None:
                    sockets, self.endpoint, self.publish_endpoint = opened
                    self._serve(sockets, self.endpoint, self.publish_endpoint)
        except Exception:
            logger.warning("the event channel has ended by a fault", exc_info=True)
        finally:
            self._detach()
            self._inbox.clear()
            self._device_inbox.clear()

    def _await_description(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._source.is_ready and time.monotonic() < deadline:
            if self._is_closing.wait(0.02):
                return

    def _open(
        self, stack: contextlib.ExitStack
    ) -> tuple[ChannelSockets, Endpoint, Endpoint] | None:
        """Bind, as soon as the addresses are free; None if the channel is closed before.

        An engine that is restarted in place may find its predecessor not quite gone.
        """
        settings = self._settings
        while not self._is_closing.is_set():
            try:
                return stack.enter_context(
                    open_sockets(settings.endpoint, settings.publish_endpoint, settings.curve)
                )
            except OSError as error:
                kind = f"bind {settings.endpoint.address}"
                warnings.warn(kind, "the event channel is off until %s", error)
            if self._is_overfull:
                self._drop_inboxes()
            self._is_closing.wait(_BIND_AGAIN_SECONDS)
        return None

    def _serve(self, sockets: ChannelSockets, asked: Endpoint, published: Endpoint) -> None:
        settings = self._settings
        instance_id = settings.instance_id or f"{socket.gethostname()}:{asked.port}"
        stream = EventStream(
            instance_id=instance_id + settings.id_suffix,
            model=self._source.model,
            block_tokens=self._source.block_tokens,
            replay_bytes=settings.replay_bytes,
            incarnation=time.time_ns(),
        )
        answers = Answers(
            stream,
            self._source,
            self._device,
            publish_endpoint=published.announced,
            heartbeat_seconds=settings.heartbeat_seconds,
        )
        logger.info(
            "%s publishes its events: ask %s, listen at %s",
            stream.instance_id,
            asked.announced,
            published.announced,
        )
        if settings.curve is None and not (asked.is_loopback and published.is_loopback):
            logger.warning(
                "whoever reaches %s can follow what this instance holds: no events.curve is set",
                asked.announced,
            )
        due = next_beat = time.monotonic()
        while not self._is_closing.is_set():
            if sockets.wait(self._idle_seconds(due, next_beat)):
                self._take_questions(sockets, answers)
            now = time.monotonic()
            if now >= due:
                is_done = self._turn(sockets, stream)
                due = now + max(_SHORTEST_SECONDS, settings.coalesce_seconds) * is_done
            if now >= next_beat and self._is_whole:
                next_beat = now + settings.heartbeat_seconds
                self._beat(sockets, stream, answers)
            self._go_on(sockets)
        self._turn(sockets, stream)

    def _idle_seconds(self, due: float, next_beat: float) -> float:
        """How long there is nothing to do besides questions."""
        if self._is_whole:
            if self._answers:
                return 0.0
            due = min(due, next_beat)
        return min(_WAIT_SECONDS, due - time.monotonic())

    # ---- events ----

    def _turn(self, sockets: ChannelSockets, stream: EventStream) -> bool:
        """Publish what has come; returns whether that was all."""
        try:
            if self._begin_anew_at is not None:
                if time.monotonic() < self._begin_anew_at:
                    return True
                self._begin_anew(stream)
            return self._publish(sockets, stream)
        except Exception as error:  # noqa: BLE001 - a fault must not end the channel
            warnings.warn("publish", "events could not be published, beginning anew: %r", error)
            self._begin_anew_at = time.monotonic() + _ANEW_SECONDS
            return True

    def _publish(self, sockets: ChannelSockets, stream: EventStream) -> bool:
        for _ in range(0, _EVENTS_PER_TURN, _EVENTS_AT_ONCE):
            if self._is_overfull:
                warnings.warn("overflow", "too many events at once, the channel begins anew")
                self._drop_inboxes()
                self._begin_anew(stream)
            is_empty = self._drain(sockets, stream)
            if is_empty:
                break
            time.sleep(_BREATH_SECONDS)
        self._flush(sockets, stream)
        return is_empty

    @property
    def _is_overfull(self) -> bool:
        return max(len(self._inbox), len(self._device_inbox)) > self._settings.inbox_events // 2

    def _drop_inboxes(self) -> None:
        """What was in them is found in the books at the next beginning, but for the device's."""
        if len(self._device_inbox) > self._settings.inbox_events // 2 and self._device is not None:
            self._device_inbox.clear()
            self._device.forget()
        self._inbox.clear()
        self._begin_anew_at = time.monotonic()

    def _drain(self, sockets: ChannelSockets, stream: EventStream) -> bool:
        """Take some events; returns whether none is left."""
        taken = 0
        while taken < _EVENTS_AT_ONCE and self._inbox:
            stream.hear(self._inbox.popleft())
            taken += 1
            if stream.is_full:
                self._flush(sockets, stream)
        if self._settle_after is not None:
            self._settle_after -= taken
            if self._settle_after <= 0:
                self._settle_after = None
                stream.settle()
        while taken < _EVENTS_AT_ONCE and self._device_inbox:
            raw = self._device_inbox.popleft()
            taken += 1
            for event in self._translated(raw):
                taken += 1
                stream.hear(event)
                if stream.is_full:
                    self._flush(sockets, stream)
        return taken < _EVENTS_AT_ONCE

    def _translated(self, raw: Any) -> list[KVCEvent]:
        """Facts about the device. What could not be read may have been a removal."""
        if self._device is None:
            return []
        try:
            return self._device.translate(raw)
        except Exception:
            self._device.forget()
            raise

    def _flush(self, sockets: ChannelSockets, stream: EventStream) -> None:
        payload = stream.flush()
        if payload is not None:
            sockets.publish(TOPIC, payload)

    def _begin_anew(self, stream: EventStream) -> None:
        """A new incarnation, with fingerprints of what is there now."""
        for answer in self._answers:
            answer.parts = iter((refusal(answer.request_id, "the instance has begun anew"),))
            answer.part = None
        # What comes after this is heard, whether a listing has it too or not.
        self._inbox.clear()
        stream.restart(max(time.time_ns(), stream.incarnation + 1))
        for group, tier in self._source.places:
            stream.refill(group, tier, self._source.list_facts(group, tier))
        self._source.pass_lock()  # a change that the listings show may not have been said yet
        self._settle_after = len(self._inbox)
        if self._device is not None:
            for group in self._device.groups:
                for _, digest in self._device.held(group):
                    stream.holding(group, DEVICE_TIER).add(digest)
        self._begin_anew_at = None

    def _beat(self, sockets: ChannelSockets, stream: EventStream, answers: Answers) -> None:
        try:
            beat = Heartbeat(
                FORMAT_VERSION,
                stream.instance_id,
                stream.incarnation,
                stream.sequence,
                time.time(),
                answers.revision(),
                self._source.system(),
                answers.digests(),
            )
            sockets.publish(TOPIC, encode_message(beat))
        except Exception as error:  # noqa: BLE001 - a fault must not end the channel
            warnings.warn("heartbeat", "no heartbeat could be published: %r", error)

    # ---- questions ----

    def _take_questions(self, sockets: ChannelSockets, answers: Answers) -> None:
        for _ in range(_QUESTIONS_AT_ONCE):
            try:
                envelope = sockets.take_question()
            except ValueError as error:
                warnings.warn("envelope", "a question of the event channel is refused: %s", error)
                continue
            if envelope is None:
                return
            identity, payload = envelope
            try:
                question = decode_question(payload)
            except MessageError as error:
                warnings.warn("question", "a question of the event channel is refused: %s", error)
                parts: Iterator[bytes | None] = iter((refusal(0, str(error)),))
                request_id = 0
            else:
                parts, request_id = answers.parts(question), question.request_id
            if len(self._answers) >= _OPEN_ANSWERS:
                _try_to_answer(sockets, identity, refusal(request_id, "too many questions at once"))
                continue
            self._answers.append(_OpenAnswer(identity, request_id, parts))

    def _go_on(self, sockets: ChannelSockets) -> None:
        """Send one part of one answer; the others get their turn before it goes on."""
        if not self._answers or not self._is_whole:
            return
        answer = self._answers.popleft()
        time.sleep(_BREATH_SECONDS)
        try:
            if self._advance(sockets, answer):
                self._answers.append(answer)
        except ConnectionError:
            pass  # whoever asked is gone
        except Exception as error:  # noqa: BLE001 - a fault must not end the channel
            warnings.warn("answer", "a question could not be answered: %r", error)
            _try_to_answer(sockets, answer.identity, refusal(answer.request_id, "a fault"))

    def _advance(self, sockets: ChannelSockets, answer: _OpenAnswer) -> bool:
        """Returns whether there may be more."""
        if answer.part is None:
            try:
                answer.part = next(answer.parts)
            except StopIteration:
                return False
            if answer.part is None:
                return True
        now = time.monotonic()
        if sockets.answer(answer.identity, answer.part):
            answer.part = None
            answer.deadline = now + _ANSWER_SECONDS
            return True
        if len(self._answers) == 0:
            time.sleep(_SHORTEST_SECONDS)  # nothing else to do until somebody reads
        return now < answer.deadline


def _try_to_answer(sockets: ChannelSockets, identity: bytes, part: bytes) -> None:
    try:
        sockets.answer(identity, part)
    except ConnectionError:
        return
