"""An instance that publishes what it does on the native channel, without an engine and sockets."""

from collections import deque
from hashlib import sha256
from itertools import pairwise

from naive_kvbm import Key, blocks_of, digest_of

from opal_connector.events import DEVICE_TIER, Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    AskContents,
    AskDescription,
    AskDigests,
    AskReplay,
    Batch,
    Contents,
    Description,
    DigestsNow,
    GroupDescription,
    Heartbeat,
    InstanceDescription,
    Question,
    Refused,
    Replay,
    Reply,
    SystemEvent,
    TierDescription,
    encode_message,
)

MEMORY, DISK = "CPUMemory", "LocalNVMe"
BLOCK_TOKENS = 16
Object = tuple[bytes, ...]  # parent, then the hashes of its blocks


def sample_object(number: int) -> Object:
    """Object `number`: two blocks; each even one and its successor share the first."""
    parent = sha256(b"parent%d" % (number // 2)).digest()
    first = sha256(b"first%d" % (number // 2)).digest()
    return parent, first, sha256(b"second%d" % number).digest()


class SimulatedInstance:
    """Tiers that hold objects, a device that holds blocks, and the log of what happened to them.

    `objects` is the truth of the tiers, `known` what the running process knows of it: after a
    restart it finds the objects of its persistent tier one by one.
    """

    def __init__(
        self,
        instance_id: str = "a",
        *,
        replay_batches: int = 8,
        part_facts: int = 3,
        group_count: int = 1,
    ):
        self.instance_id = instance_id
        self.group_count = group_count
        self.incarnation = 1
        self.revision = 0
        self.replay_batches = replay_batches
        self.part_facts = part_facts
        self.disk: set[Object] = set()
        self._start()

    def _start(self) -> None:
        self.known: dict[str, set[Object]] = {MEMORY: set(), DISK: set()}
        self.device: set[Object] = set()
        self.sequence = -1
        self.pending: list[KVCEvent] = []
        self.log: deque[tuple[int, bytes]] = deque(maxlen=self.replay_batches)
        self.published: dict[Key, set[bytes]] = {}
        self.is_disk_open = not self.disk

    # ---- what it does ----

    def insert(self, obj: Object, tier: str) -> None:
        held = self._held(tier)
        if obj not in held:
            fact = self._fact(obj, tier)
            held.add(obj)
            if tier == DISK:
                self._on_disk(obj, is_there=True)
            self.pending.append(Insert(fact, tier))

    def delete(self, obj: Object, tier: str) -> None:
        held = self._held(tier)
        if obj in held:
            held.discard(obj)
            if tier == DISK:
                self._on_disk(obj, is_there=False)
            self.pending.append(Delete(self._fact(obj, tier), tier))

    def move(self, obj: Object, source: str, target: str) -> None:
        if obj in self.known[source] and obj not in self.known[target]:
            fact = self._fact(obj, target)
            self.known[source].discard(obj)
            self.known[target].add(obj)
            self._on_disk(obj, is_there=target == DISK)
            shared = self._fact(obj, source).shared_blocks
            self.pending.append(Move(fact, source, target, shared))

    def copy(self, obj: Object, source: str, target: str) -> None:
        if obj in self.known[source] and obj not in self.known[target]:
            fact = self._fact(obj, target)
            self.known[target].add(obj)
            if target == DISK:
                self._on_disk(obj, is_there=True)
            self.pending.append(Copy(fact, source, target))

    def clear_device(self) -> None:
        """A reset of the engine's own cache: one event that names all blocks of a group."""
        for group in range(self.group_count):
            blocks = sorted(self._blocks(DEVICE_TIER, group))
            if blocks:
                self.pending.append(Delete(ObjectFact(group, b"", b"".join(blocks)), DEVICE_TIER))
        self.device = set()

    def restart(self, lost_on_disk: int = 0) -> None:
        """The process ends, its unpublished events with it; some files may vanish meanwhile."""
        for obj in sorted(self.disk)[:lost_on_disk]:
            self.disk.discard(obj)
        self.incarnation += 1
        self._start()

    def find_on_disk(self, count: int) -> None:
        """Look through the next files of the persistent tier."""
        for obj in sorted(self.disk - self.known[DISK])[:count]:
            self.pending.append(Insert(self._fact(obj, DISK), DISK))
            self.known[DISK].add(obj)
        self.is_disk_open = self.is_disk_open or self.disk <= self.known[DISK]

    def delete_everything(self) -> None:
        self.clear_device()
        for tier in (MEMORY, DISK):
            for obj in sorted(self.known[tier]):
                self.delete(obj, tier)

    # ---- what it says ----

    def flush(self, size: int = 100) -> list[bytes]:
        """Publish what is pending."""
        out = []
        while self.pending:
            events, self.pending = self.pending[:size], self.pending[size:]
            out.append(self._publish(tuple(events)))
        return out

    def _publish(self, events: tuple[KVCEvent, ...]) -> bytes:
        self.sequence += 1
        for event in events:
            self._note(event)
        batch = Batch(
            FORMAT_VERSION,
            self.instance_id,
            "m",
            self.incarnation,
            self.sequence,
            0.0,
            BLOCK_TOKENS,
            events,
        )
        payload = encode_message(batch)
        self.log.append((self.sequence, payload))
        return payload

    def heartbeat(self) -> bytes:
        digests = tuple(
            digest_of(key, blocks, is_complete=self._is_complete(key))
            for key, blocks in sorted(self.published.items())
            if blocks
        )
        return encode_message(
            Heartbeat(
                FORMAT_VERSION,
                self.instance_id,
                self.incarnation,
                self.sequence,
                0.0,
                self.revision,
                SystemEvent(queue_depth=self.sequence + 1),
                digests,
            )
        )

    def answer(self, question: Question) -> list[Reply]:
        match question:
            case AskDescription():
                return [self._description(question.request_id)]
            case AskReplay():
                return self._replay(question)
            case AskDigests():
                digests = tuple(
                    digest_of(key, blocks, is_complete=self._is_complete(key))
                    for key, blocks in sorted(self.published.items())
                    if blocks
                )
                return [
                    DigestsNow(
                        FORMAT_VERSION,
                        question.request_id,
                        self.incarnation,
                        self.sequence,
                        digests,
                    )
                ]
            case AskContents():
                return self._contents(question)
        return [Refused(FORMAT_VERSION, question.request_id, "unknown question")]

    def blocks(self) -> dict[Key, set[bytes]]:
        """What is there, by group and tier."""
        tiers = (DEVICE_TIER, MEMORY, DISK)
        return {
            (group, tier): held
            for tier in tiers
            for group in range(self.group_count)
            if (held := self._blocks(tier, group))
        }

    def description(self) -> InstanceDescription:
        return InstanceDescription(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model="m",
            block_tokens=BLOCK_TOKENS,
            tiers=(TierDescription(MEMORY), TierDescription(DISK, is_persistent=True)),
            groups=(
                GroupDescription(0, "full_attention"),
                *(
                    GroupDescription(group, "sliding_window", BLOCK_TOKENS, (group,), 40 * group)
                    for group in range(1, self.group_count)
                ),
            ),
        )

    # ---- inside ----

    def _held(self, tier: str) -> set[Object]:
        return self.device if tier == DEVICE_TIER else self.known[tier]

    def _on_disk(self, obj: Object, *, is_there: bool) -> None:
        if is_there:
            self.disk.add(obj)
        else:
            self.disk.discard(obj)

    def group_of(self, obj: Object) -> int:
        """The group of an object, the same for those that share blocks."""
        return obj[0][0] % self.group_count

    def _blocks(self, tier: str, group: int) -> set[bytes]:
        return {
            block for obj in self._held(tier) if self.group_of(obj) == group for block in obj[1:]
        }

    def _fact(self, obj: Object, tier: str) -> ObjectFact:
        others = self._held(tier) - {obj}
        shared = int(any(other[1] == obj[1] for other in others))
        return ObjectFact(self.group_of(obj), obj[0], b"".join(obj[1:]), shared)

    def _is_complete(self, key: Key) -> bool:
        return key[1] != DISK or self.is_disk_open

    def _note(self, event: KVCEvent) -> None:
        group = event.fact.group
        names = {block for _, block in blocks_of(event.fact)}
        match event:
            case Insert(_, tier) | Copy(_, _, tier):
                self.published.setdefault((group, tier), set()).update(names)
            case Delete(_, tier):
                self.published.setdefault((group, tier), set()).difference_update(names)
            case Move(fact, source, target, shared):
                self.published.setdefault((group, target), set()).update(names)
                left = {block for _, block in blocks_of(fact, shared)}
                self.published.setdefault((group, source), set()).difference_update(left)

    def _description(self, request_id: int) -> Description:
        return Description(
            FORMAT_VERSION,
            request_id,
            self.description(),
            "tcp://*:1",
            1.0,
            self.revision,
            self.sequence,
        )

    def _replay(self, question: AskReplay) -> list[Reply]:
        kept = [payload for number, payload in self.log if number >= question.first_sequence]
        if not any(number == question.first_sequence for number, _ in self.log):
            kept = []
        runs = [kept[place : place + 2] for place in range(0, len(kept), 2)] or [[]]
        return [
            Replay(
                FORMAT_VERSION,
                question.request_id,
                self.incarnation,
                tuple(run),
                part == len(runs) - 1,
                part,
            )
            for part, run in enumerate(runs)
        ]

    def _contents(self, question: AskContents) -> list[Reply]:
        held = {obj for obj in self._held(question.tier) if self.group_of(obj) == question.group}
        singles = {
            block: ObjectFact(question.group, parent, block)
            for obj in sorted(held)
            for parent, block in pairwise(obj)
            if not question.buckets or block[0] in question.buckets
        }
        facts = list(singles.values())
        step = self.part_facts
        runs = [facts[place : place + step] for place in range(0, len(facts), step)] or [[]]
        return [
            Contents(
                FORMAT_VERSION,
                question.request_id,
                self.incarnation,
                self.sequence,
                tuple(run),
                part == len(runs) - 1,
                self._is_complete((question.group, question.tier)),
                part,
            )
            for part, run in enumerate(runs)
        ]
