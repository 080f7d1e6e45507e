"""The shared directory of a simulation: one medium, and the keepers of all who mount it."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move
from opal_connector.keys import HASH_BYTES
from opal_connector.managers import OpalKVCacheManager, SharedSpace, object_key
from opal_connector.simulation.device import SimulatedDevice
from opal_connector.transfers import ObjectName, Question, SharedNews

_TARGET = 0.95  # of the limit: where eviction stops, as in the real one


class _File:
    """One file. Mutable state: whose books know it."""

    __slots__ = ("known_to", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.known_to: list[SimulatedKeeper] = []


class SimulatedDirectory:
    """Files under one limit, whoever writes them.

    Who mounts it hears at once what others remove, and of what others write only what it asks for:
    nobody lists the directory. Mutable state: the files by key, the oldest use first, their bytes,
    the bytes that somebody may still write, who mounts it, and how many files had to go.
    """

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.used_bytes = 0
        self.promised_bytes = 0
        self.removed_count = 0
        self.keepers: list[SimulatedKeeper] = []
        self._files: OrderedDict[bytes, _File] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def wrote(self, key: bytes, size_bytes: int, keeper: "SimulatedKeeper") -> None:
        """A keeper's books know a file, because it was written there or was asked for."""
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = _File(size_bytes)
            self.used_bytes += size_bytes
        if keeper not in file.known_to:
            file.known_to.append(keeper)

    def used(self, keys: Sequence[bytes]) -> None:
        """These files were used, the last one most recently."""
        for key in keys:
            if key in self._files:
                self._files.move_to_end(key)

    def remove(self, key: bytes) -> list["SimulatedKeeper"]:
        """Remove a file; returns whose books knew it."""
        file = self._files.pop(key, None)
        if file is None:
            return []
        self.used_bytes -= file.size_bytes
        return file.known_to

    def room(self, capacity_bytes: int, wanted_bytes: int) -> tuple[int, list[bytes]]:
        """The oldest files that nobody uses and that must go for what is wanted, if any must.

        Returns the bytes that are free without them, and their keys.
        """
        free_bytes = capacity_bytes - self.used_bytes - self.promised_bytes
        if free_bytes >= wanted_bytes:
            return free_bytes, []
        gone: list[bytes] = []
        enough_bytes = wanted_bytes + int((1 - _TARGET) * capacity_bytes)
        for key, file in self._files.items():
            if free_bytes >= enough_bytes:
                break
            if not any(keeper.holds(key) for keeper in file.known_to):
                gone.append(key)
                free_bytes += file.size_bytes
        return free_bytes, gone


class SimulatedKeeper:
    """Keeps one instance's books in touch with a directory.

    `changed` is called when news have changed the books. Mutable state: whether there was no room
    when it was asked last, and what the directory has been told that the books may write.
    """

    def __init__(
        self,
        directory: SimulatedDirectory,
        manager: OpalKVCacheManager,
        place: int,
        space: SharedSpace,
        *,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self.place = place
        self.tier = manager.tier_names[place]
        self.was_full = False
        self._promised_bytes = 0
        self._manager = manager
        self._space = space
        self._changed = changed
        directory.keepers.append(self)

    @property
    def is_asked(self) -> bool:
        """Whether the books want room."""
        return self._space.wanted_bytes > 0

    def promise(self) -> None:
        """Tell the directory what the books may write that is not there yet."""
        before, self._promised_bytes = self._promised_bytes, self._space.promised_bytes
        self.directory.promised_bytes += self._promised_bytes - before

    def holds(self, key: bytes) -> bool:
        """Whether the books use a file, or have promised it."""
        return self._manager.is_held(key)

    def follow(self, events: Sequence[KVCEvent], now: float) -> None:
        """Take note of what the books have written and removed."""
        for event in events:
            key = object_key(event.fact.chunk_hash, event.fact.group)
            match event:
                case Insert(tier=tier) | Copy(target_tier=tier) | Move(target_tier=tier):
                    if tier == self.tier:
                        blocks = len(event.fact.block_hashes) // HASH_BYTES
                        self.directory.wrote(key, self._space.size_bytes(blocks), self)
                case Delete(tier=tier):
                    if tier == self.tier:
                        self._tell_gone([key], now, without=self)

    def poll(self, now: float) -> None:
        """Answer a wish for room, if there is one."""
        self.promise()
        wanted_bytes = self._space.wanted_bytes
        if not wanted_bytes:
            return
        free_bytes, gone = self.directory.room(self._space.capacity_bytes, wanted_bytes)
        self.directory.removed_count += len(gone)
        self._tell_gone(gone, now)
        granted_bytes = max(0, min(wanted_bytes, free_bytes))
        self.was_full = not granted_bytes
        self._manager.hear(  # whoever polls knows that the books have changed
            SharedNews(
                self.place,
                is_grant=True,
                granted_bytes=granted_bytes,
                was_crowded=bool(gone) or granted_bytes < wanted_bytes,
            ),
            now,
        )
        self.promise()

    def answer(self, questions: Sequence[Question], now: float) -> None:
        """Tell the books what there is of what they asked for."""
        found: list[ObjectName] = []
        for question in questions:
            names = list(takewhile(self._exists, question.chain))
            found += names
            if len(names) == len(question.chain):
                found += [name for name in question.tails if self._exists(name)][:1]
            found += [name for name in question.singles if self._exists(name)]
        answered = tuple(question.question_id for question in questions)
        self.hear(SharedNews(self.place, answered, tuple(found)), now)

    def hear(self, news: SharedNews, now: float) -> None:
        """Write news into the books."""
        self._manager.hear(news, now)
        self._changed()

    def _exists(self, name: ObjectName) -> bool:
        return object_key(name.chunk_hash, name.group) in self.directory

    def _tell_gone(
        self, keys: Sequence[bytes], now: float, without: "SimulatedKeeper | None" = None
    ) -> None:
        gone: dict[SimulatedKeeper, list[bytes]] = {}
        for key in keys:
            for keeper in self.directory.remove(key):
                if keeper is not without:
                    gone.setdefault(keeper, []).append(key)
        for keeper, its in gone.items():
            keeper.hear(SharedNews(keeper.place, gone=tuple(its)), now)
