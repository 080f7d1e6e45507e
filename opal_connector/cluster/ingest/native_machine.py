"""One instance on the native channel, as a state machine without sockets and clocks.

It wants things in a fixed order (who the instance is, its contents, a lost batch, a bucket that
differs) and asks for one at a time; what cannot be had is answered by the next coarser means: a
replay by contents, contents by giving up what was known.
"""

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from opal_connector.cluster.ingest.conversation import Conversation
from opal_connector.cluster.ingest.states import (
    BlockIndex,
    SourceLimits,
    SourceMetrics,
    SourceState,
)
from opal_connector.cluster.ingest.tier_sync import TierSync
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskDescription,
    Batch,
    Contents,
    Description,
    DigestsNow,
    Heartbeat,
    InstanceDescription,
    Published,
    Question,
    Refused,
    Replay,
    Reply,
)
from opal_connector.reports import RateLimitedWarnings

logger = logging.getLogger(__name__)

_PAST_INCARNATIONS = 16
_BACKWARD_HEARTBEATS = 3  # one alone may just be late
_SILENT_QUESTION_SECONDS = 10.0


class Ask(msgspec.Struct, frozen=True):
    """Send a question to the instance."""

    question: Question


class Subscribe(msgspec.Struct, frozen=True):
    """Follow what the instance publishes there, and nothing else."""

    publish_endpoint: str


Action = Ask | Subscribe


class NativeMachine:
    """The state of one native source and all that moves it.

    Mutable state: who the instance is, whether it is heard, the open question and, in `TierSync`,
    how far its facts were applied. One thread calls it; every call returns what is to be done now.
    """

    def __init__(
        self,
        index: BlockIndex,
        name: str,
        *,
        limits: SourceLimits | None = None,
        warnings: RateLimitedWarnings | None = None,
        claim: Callable[[str], bool] = bool,
    ) -> None:
        self._index = index
        self._name = name
        self._limits = limits or SourceLimits()
        self._warnings = warnings or RateLimitedWarnings(logger)
        self._claim = claim
        self._talk = Conversation(self._limits)
        self._past: deque[tuple[str, int]] = deque(maxlen=_PAST_INCARNATIONS)
        self._actions: list[Action] = []
        self._description: InstanceDescription | None = None
        self._publish_endpoint: str | None = None
        self._wants_description = True
        self._revision = -1
        self._stale_after = self._limits.stale_seconds
        self._heard_at = 0.0
        self._is_heard = True
        self._asked_at = 0.0  # who it is, since it is not heard
        self._backward_heartbeats = 0
        self._refusals = 0
        self._accounted_at: float | None = None
        self.metrics = SourceMetrics()
        self._sync = TierSync(index, self._talk, self._limits, self.metrics)

    # ---- what it is ----

    @property
    def state(self) -> SourceState:
        """Where this source stands."""
        if self._description is None:
            return SourceState.INIT
        if not self._is_heard:
            return SourceState.STALE
        if self._sync.is_syncing:
            return SourceState.SYNCING
        return SourceState.GAP if self._sync.has_gap else SourceState.LIVE

    @property
    def worker_id(self) -> str | None:
        """The worker that this source feeds, None before it is known."""
        return None if self._description is None else self._description.instance_id

    @property
    def applied(self) -> int | None:
        """The last batch that was applied, None before there was one."""
        return self._sync.applied if self._sync.applied >= 0 else None

    @property
    def is_settled(self) -> bool:
        """Whether it is LIVE, waits for nothing and found no difference."""
        is_live = self.state is SourceState.LIVE
        return is_live and self._talk.open is None and self._sync.is_equal

    # ---- what moves it ----

    def on_published(self, message: Published, size: int, now: float) -> list[Action]:
        """Take a message of the stream."""
        self._account(now)
        self.metrics.bytes += size
        if self._is_ours(message.instance_id, message.incarnation, now):
            if isinstance(message, Batch):
                self.metrics.batches += 1
                if not self._sync.offer(message, size, now):
                    self._overflow()
            else:
                self._on_heartbeat(message, now)
        return self._advance(now)

    def on_reply(self, reply: Reply, size: int, now: float) -> list[Action]:
        """Take an answer, or a part of one."""
        self._account(now)
        self.metrics.bytes += size
        if not self._talk.is_answer(reply.request_id):
            self.metrics.late += 1
            return self._advance(now)
        self._talk.heard(now)
        if isinstance(reply, Refused):
            self.metrics.refused += 1
            self._warnings.warn(
                f"refused {self._name}", "%s does not answer: %s", self._name, reply.reason
            )
            self._on_refused(now)
            return self._advance(now)
        self._refusals = 0
        if isinstance(reply, Description):
            self._on_description(reply, now)
        elif self._is_of_this_incarnation(reply, now) and self._sync.on_reply(reply, now):
            self._talk.succeed()
        return self._advance(now)

    def on_malformed(self, size: int, now: float) -> list[Action]:
        """Note a message that cannot be read; what it said is missed, and found to be missing."""
        self._account(now)
        self.metrics.bytes += size
        self.metrics.malformed += 1
        return self._advance(now)

    def on_fault(self, now: float) -> list[Action]:
        """Begin again after a message could not be applied."""
        self._account(now)
        self.metrics.faults += 1
        self._talk.close()
        self._talk.hold(now)
        self._publish_endpoint = None  # its stream may be what could not be opened
        self._wants_description = True
        if self._description is not None:
            self._sync.begin()
        return self._advance(now)

    def resync(self, now: float) -> list[Action]:
        """Compare with what the instance has, from its digests on."""
        self._account(now)
        if self._description is not None:
            self._talk.close()
            self._sync.begin()
        return self._advance(now)

    def on_tick(self, now: float) -> list[Action]:
        """Let time pass."""
        self._account(now)
        is_silent = now - self._heard_at > self._stale_after
        if self._description is not None and self._is_heard and is_silent:
            self._is_heard = False
            self.metrics.lost_heartbeats += 1
            self._sync.must_compare()
            self._index.set_live(self._description.instance_id, is_live=False)
        if not self._is_heard and now - self._asked_at >= _SILENT_QUESTION_SECONDS:
            self._asked_at = now
            self._wants_description = True  # it may have started again, and publish elsewhere
        if self._talk.is_overdue(now):
            self.metrics.timeouts += 1
            question = self._talk.again(now)
            if question is None:
                self._fail(now)
            else:
                self._sync.on_asked(question)
                self._actions.append(Ask(question))
        return self._advance(now)

    # ---- who it is ----

    def _is_ours(self, instance_id: str, incarnation: int, now: float) -> bool:
        """Whether a published message is of the incarnation that is followed."""
        if self._description is None:
            return False  # what was published before the first question is in the answers
        if (instance_id, incarnation) == self._identity(self._description):
            return True
        if (instance_id, incarnation) in self._past:
            self.metrics.late += 1
            return False
        if instance_id == self._description.instance_id:
            self._restart(incarnation, now)
        else:
            self._wants_description = True
        return False

    def _is_of_this_incarnation(self, reply: Replay | DigestsNow | Contents, now: float) -> bool:
        description = self._description
        if description is None:
            return False
        if reply.incarnation == description.incarnation:
            return True
        self._talk.close()
        if (description.instance_id, reply.incarnation) in self._past:
            self.metrics.late += 1
            self._wants_description = True  # it knows best which one it is
            self._talk.hold(now)  # and may never say the same twice
        else:
            self._restart(reply.incarnation, now)
        return False

    def _restart(self, incarnation: int, now: float) -> None:
        """Drop what does not survive a restart, at once, and get to know the new one."""
        old = self._description
        if old is None:
            return
        self.metrics.restarts += 1
        self._past.append(self._identity(old))
        self._adopt(msgspec.structs.replace(old, incarnation=incarnation), now)
        self._sync.drop_volatile()
        self._wants_description = True

    def _adopt(self, description: InstanceDescription, now: float) -> None:
        self._description = description
        self._backward_heartbeats = 0
        self._heard_at = now
        self._talk.close()
        self._index.join(description)
        if not self._is_heard:
            self._index.set_live(description.instance_id, is_live=False)
        self._sync.start(description)

    def _on_description(self, reply: Description, now: float) -> None:
        self._talk.close()
        new, old = reply.instance, self._description
        if (old is None or old.instance_id != new.instance_id) and not self._claim(new.instance_id):
            self.metrics.conflicts += 1
            self._warnings.warn(
                f"conflict {self._name}",
                "%s says that it is %s, which another source feeds already",
                self._name,
                new.instance_id,
            )
            self._talk.hold(now)
            if old is not None:  # whom it was is not here any more, whoever that feeds now
                self._index.remove_worker(old.instance_id)
                self._past.append(self._identity(old))
                self._description = None
            return
        self._wants_description = False
        self._revision = reply.revision
        self._stale_after = max(
            self._limits.stale_heartbeats * reply.heartbeat_seconds, self._limits.stale_seconds
        )
        if reply.publish_endpoint != self._publish_endpoint:
            self._publish_endpoint = reply.publish_endpoint
            self._actions.append(Subscribe(reply.publish_endpoint))
        if old is not None and self._identity(old) == self._identity(new):
            self._description = new
            self._index.join(new)
            self._sync.describe(new)
            if not self._is_heard:
                self._index.set_live(new.instance_id, is_live=False)
            return
        if old is not None:
            self.metrics.restarts += 1
            self._past.append(self._identity(old))
            if old.instance_id != new.instance_id:
                self._index.remove_worker(old.instance_id)
        if self._identity(new) in self._past:
            self._past.remove(self._identity(new))
        self._adopt(new, now)

    @staticmethod
    def _identity(description: InstanceDescription) -> tuple[str, int]:
        return description.instance_id, description.incarnation

    # ---- heartbeats ----

    def _on_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        self.metrics.heartbeats += 1
        self._heard_at = now
        self._index.process_system_events(heartbeat.instance_id, (heartbeat.system,))
        if heartbeat.revision != self._revision:
            self._wants_description = True
        if self._sync.is_syncing:
            return
        if heartbeat.sequence < self._sync.applied:
            self._backward_heartbeats += 1
            if self._backward_heartbeats >= _BACKWARD_HEARTBEATS:
                self._restart(heartbeat.incarnation, now)
                self._past.pop()  # it is the same incarnation still
            return
        self._backward_heartbeats = 0
        self._sync.on_heartbeat(heartbeat, now)

    # ---- what to do next ----

    def _advance(self, now: float) -> list[Action]:
        description = self._description
        is_silent = now - self._heard_at > self._stale_after
        may_return = not self._is_heard and not is_silent and self._sync.is_compared
        if description is not None and may_return:
            self._is_heard = True
            self._index.set_live(description.instance_id, is_live=True)
        if self._talk.may_ask(now):
            question = self._next_question(now)
            if question is not None:
                question = self._talk.ask(question, now)
                self._sync.on_asked(question)
                self._actions.append(Ask(question))
        actions, self._actions = self._actions, []
        return actions

    def _next_question(self, now: float) -> Question | None:
        if self._wants_description:
            return AskDescription(FORMAT_VERSION, 0)
        return self._sync.next_question(now)

    def _on_refused(self, now: float) -> None:
        """Once may be a bad moment, as when the instance begins anew."""
        self._refusals += 1
        if self._refusals >= self._limits.request_attempts:
            self._refusals = 0
            self._fail(now)
        else:
            self._talk.close()
            self._talk.hold(now)

    def _overflow(self) -> None:
        """More batches wait than may be kept: contents are shorter."""
        self.metrics.overflows += 1
        self._talk.close()
        self._sync.begin()

    def _fail(self, now: float) -> None:
        """Nobody answered: try what is coarser, or give up what was known and go on trying."""
        self._talk.close()
        if self._description is None:
            self._talk.hold(now)
        elif not self._sync.is_syncing:
            if self._wants_description:
                self._talk.hold(now)  # only the description has changed
            else:
                self._sync.begin()
        else:
            self._talk.hold(now)
            self._sync.begin()
            if self._sync.purge():
                self.metrics.purges += 1
                self._warnings.warn(
                    f"purge {self._name}",
                    "%s: what %s has is not known any more, and neither its batches nor its "
                    "contents can be had; nothing is credited to it until they can",
                    self._name,
                    self._description.instance_id,
                )

    def _account(self, now: float) -> None:
        if self._accounted_at is not None:
            self.metrics.seconds[self.state] += max(0.0, now - self._accounted_at)
        self._accounted_at = now
