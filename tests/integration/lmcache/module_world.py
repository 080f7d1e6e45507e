"""A real storage manager, event bus and server context of LMCache's, with the server module."""

import contextlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from l2_world import until
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.event_bus import EventBusConfig, init_event_bus
from lmcache.v1.multiprocess.config import DEFAULT_COORDINATOR_CONFIG, MPServerConfig
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import ExtServerModuleBuildContext
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move
from opal_connector.integrations.lmcache.server_module import (
    OpalEventModule,
    build_server_modules,
)
from opal_connector.keys import RequestIdentity, TokenChain

MODEL = "model"
CHUNK_TOKENS = 4
LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 1024])], dtypes=[torch.float32])
Contents = dict[tuple[int, str], set[bytes]]


def rank_of(worker: int, world_size: int) -> int:
    return int(ObjectKey.ComputeKVRank(world_size, worker, world_size, worker))


class World:
    """A server without transport. Its bus is drained only when a test says so."""

    def __init__(self, context: Any, bus: Any, module: OpalEventModule) -> None:
        self.context = context
        self.bus = bus
        self.module = module
        self.manager = context.storage_manager
        self.hasher = TokenHasher(chunk_size=CHUNK_TOKENS)
        self.events: list[KVCEvent] = []
        self.digests: dict[tuple[bytes, str], bytes] = {}

    # ---- what an engine does ----

    def names(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """LMCache's names of a prompt's chunks; what they must be in Opal's chain is noted."""
        names = self.hasher.compute_chunk_hashes(list(tokens))
        chain = TokenChain(RequestIdentity(cache_salt=salt or None), CHUNK_TOKENS)
        chain.extend(tokens)
        for name, digest in zip(names, chain.hashes, strict=True):
            self.digests[name, salt] = digest
        return names

    def tell_tokens(
        self, tokens: Sequence[int], *, first_chunk: int = 0, session: str = ""
    ) -> None:
        """What the server publishes when a store of some chunks is submitted."""
        names = self.hasher.compute_chunk_hashes(list(tokens))
        starts = range(first_chunk * CHUNK_TOKENS, len(names) * CHUNK_TOKENS, CHUNK_TOKENS)
        facts = {
            "chunk_hashes": names[first_chunk:],
            "token_chunks": [list(tokens[start : start + CHUNK_TOKENS]) for start in starts],
            "token_offsets": list(starts),
            "parent_hashes": [None, *names][first_chunk:-1],
        }
        self.bus.publish(Event(EventType.MP_TOKENS, metadata=facts, session_id=session))

    def keys(
        self,
        tokens: Sequence[int],
        *,
        salt: str = "",
        model: str = MODEL,
        workers: Sequence[int] = (0,),
        world_size: int = 1,
        group: int = 0,
    ) -> list[ObjectKey]:
        return [
            ObjectKey(name, model, rank_of(worker, world_size), group, salt)
            for name in self.names(tokens, salt)
            for worker in workers
        ]

    def write(self, keys: list[ObjectKey]) -> None:
        """Store into L1, as far as there is room."""
        reserved = self.manager.reserve_write(keys, LAYOUT)
        self.manager.finish_write(list(reserved))

    def store(self, tokens: Sequence[int], **which: Any) -> list[ObjectKey]:
        """A store with its tokens told."""
        keys = self.keys(tokens, **which)
        self.tell_tokens(tokens)
        self.write(keys)
        return keys

    def drain(self) -> None:
        """All that the bus holds is heard."""
        self.bus._drain_all()

    # ---- what must come of it ----

    def announced(self) -> Contents:
        """What the books of placements say is announced."""
        placements = self.module._placements
        listed = {place: placements.facts(*place) for place in placements.places}
        found = {place: {fact.chunk_hash for fact in facts} for place, facts in listed.items()}
        assert all(len(found[place]) == len(facts) for place, facts in listed.items())
        return {place: digests for place, digests in found.items() if digests}

    def replayed(self) -> Contents:
        """What the events add up to; none of them may say what was known already."""
        found: Contents = {}

        def enter(group: int, tier: str, digest: bytes) -> None:
            assert digest not in found.setdefault((group, tier), set())
            found[group, tier].add(digest)

        for event in self.events:
            group, digest = event.fact.group, event.fact.chunk_hash
            match event:
                case Insert(_, tier):
                    enter(group, tier, digest)
                case Delete(_, tier):
                    found[group, tier].remove(digest)
                case Copy(_, source, tier):
                    assert digest in found[group, source]
                    enter(group, tier, digest)
                case Move(_, source, tier):
                    found[group, source].remove(digest)
                    enter(group, tier, digest)
        return {place: digests for place, digests in found.items() if digests}

    def held(self, group: int = 0) -> Contents:
        """What LMCache's L1 and Opal's tiers hold, of all chunks whose tokens were told."""
        keys: dict[str, list[ObjectKey]] = {"CPUMemory": list(self.manager._l1_manager._objects)}
        for _, adapter in self.manager.l2_adapters():
            books = adapter.books
            for tier in books.storage.tiers:
                for record in list(tier.index.records.values()):
                    stored = books.catalog._objects.get(record.key)
                    if record.is_readable and stored is not None:
                        keys.setdefault(tier.tier, []).append(stored.key)
        found = {
            (group, tier): {self.digests[key.chunk_hash, key.cache_salt] for key in held}
            for tier, held in keys.items()
        }
        return {place: digests for place, digests in found.items() if digests}

    def settle(self, expected: Callable[[], Contents]) -> None:
        """Until what is announced is what is there, with a deadline; and so are the events."""

        def is_settled() -> bool:
            self.drain()
            return self.announced() == expected()

        until(is_settled, "what is announced is what is there", 20)
        assert self.replayed() == self.announced()


def build_context(context: Any, config: dict[str, Any]) -> ExtServerModuleBuildContext:
    """What LMCache hands to a factory."""
    return ExtServerModuleBuildContext(
        server_context=context,
        mp_config=MPServerConfig(),
        coordinator_config=DEFAULT_COORDINATOR_CONFIG,
        modules=(),
        config=config,
    )


@contextlib.contextmanager
def server(
    *adapters: dict[str, Any],
    l1_mib: float = 4,
    queue_size: int = 10_000,
    options: Sequence[str] = (),
    is_observed: bool = True,
    **config: Any,
) -> Iterator[World]:
    """A world; its channel is at any free port, and its events are noted on their way there."""
    bus = init_event_bus(EventBusConfig(enabled=is_observed, max_queue_size=queue_size))
    arguments = ["--l1-size-gb", str(l1_mib / 1024), "--eviction-policy", "noop", *options]
    arguments.append("--no-l1-use-lazy")
    for adapter in adapters:
        arguments += ["--l2-adapter", json.dumps(adapter)]
    context = MPCacheServerContext(parse_args(arguments), chunk_size=CHUNK_TOKENS)
    try:
        config = {"events": {"endpoint": "tcp://127.0.0.1:0"}, **config}
        module = build_server_modules(build_context(context, config))
        world = World(context, bus, module)
        publish = module._placements.announce

        def note(event: KVCEvent) -> None:
            world.events.append(event)
            publish(event)

        module._placements.announce = note
        yield world
        module.close()
    finally:
        context.close()
        bus.stop()


def prompts(seed: int, count: int, *, chunks: int = 6) -> list[list[int]]:
    """Prompts that share beginnings of all lengths."""
    numbers = random.Random(seed)
    found: list[list[int]] = [[numbers.randrange(1000) for _ in range(chunks * CHUNK_TOKENS)]]
    while len(found) < count:
        kept = numbers.randrange(chunks) * CHUNK_TOKENS
        fresh = [numbers.randrange(1000) for _ in range(chunks * CHUNK_TOKENS - kept)]
        found.append(numbers.choice(found)[:kept] + fresh)
    return found
