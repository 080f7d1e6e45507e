"""The KVBM beside Dynamo's RadixTree: lookups, events in, memory.

Both learn the same prefixes of the same workers and answer the same questions, in turns, and their
answers are compared. Lookups are of hashes that both have, so hashing counts for neither. The peer
(`pip install ai-dynamo-runtime==1.6.1`, the extra `dynamo`) takes events as JSON and answers from a
thread of its own (see `kept_awake`), both of which count; there is no figure of it without
decoding; the KVBM's are given with and without. Where it is not installed, the KVBM is measured
alone.

A world has `workers` that each hold half of the conversations up to a depth of their own, all of
them with a beginning in common; of every third of those some blocks were evicted in the middle.
The peer refuses a removal below a block that it has dropped; those are left out for it alone, and
change no answer.
"""

import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from common import (
    Figures,
    OtherLoad,
    at_least,
    at_most,
    emit,
    interleaved,
    machine_facts,
    median_ratio,
    note,
    parser,
    percentile,
)
from kvbm_peer import Peer, RadixTree, kept_awake, short

from opal_connector.cluster.kvbm import KVBM
from opal_connector.events import DEVICE_TIER, Delete, Insert, KVCEvent, ObjectFact
from opal_connector.events.channel import (
    FORMAT_VERSION,
    Batch,
    InstanceDescription,
    decode_published,
    encode_message,
)
from opal_connector.keys import CHAIN_ROOT

SHAPES = [(blocks, workers) for blocks in (128, 1024, 4096) for workers in (16, 64, 256)]
CONVERSATIONS = {128: 64, 1024: 32, 4096: 16}
EVENT_BLOCKS = 128
CONVERSATION_BLOCKS = 512
Conversation = list[bytes]


def conversation(name: str, blocks: int, shared: Sequence[bytes] = ()) -> Conversation:
    """Hashes as a chain would give them."""
    own = [sha256(f"{name}/{number}".encode()).digest() for number in range(blocks - len(shared))]
    return [*shared, *own]


class World:
    """The same contents in both indexes."""

    def __init__(self, blocks: int, workers: int) -> None:
        rng = random.Random(blocks * 1_000 + workers)
        self.kvbm = KVBM()
        self.peer = Peer() if RadixTree is not None else None
        shared = conversation("system prompt", blocks // 10)
        self.conversations = [
            conversation(f"conversation {number}", blocks, shared)
            for number in range(CONVERSATIONS[blocks])
        ]
        for worker in range(workers):
            join(self.kvbm, worker)
            held: set[bytes] = set()
            for hashes in self.conversations:
                if rng.random() < 0.5:
                    prefix = hashes[: rng.randint(1, blocks)]
                    held.update(prefix)
                    self._store(worker, prefix)
            for hashes in self.conversations:
                if rng.random() < 1 / 3:
                    evicted = [found for found in rng.sample(hashes, blocks // 64) if found in held]
                    held.difference_update(evicted)
                    self._remove(worker, evicted)
        self.places = self.kvbm.models()[0]
        # Questions have hashes of their own, as a router's would be.
        self.asked = [
            [bytes(bytearray(found)) for found in hashes] for hashes in self.conversations
        ]
        self.asked_of_peer = [[short(found) for found in hashes] for hashes in self.conversations]

    def _store(self, worker: int, hashes: Sequence[bytes]) -> None:
        self.kvbm.process_kvc_events(str(worker), [stored(hashes)])
        if self.peer is not None:
            self.peer.apply(worker, self.peer.stored(hashes))

    def _remove(self, worker: int, hashes: Sequence[bytes]) -> None:
        for block_hash in hashes:
            self.kvbm.process_kvc_events(str(worker), [removed([block_hash])])
            if self.peer is not None:
                self.peer.apply_if_it_can(worker, self.peer.removed([block_hash]))

    def ours(self, number: int) -> dict[str, int]:
        return self.kvbm.matched_blocks(self.places, self.asked[number])

    def theirs(self, number: int) -> dict[tuple[int, int], int]:
        assert self.peer is not None
        return dict(self.peer.tree.find_matches(self.asked_of_peer[number]).scores)

    def expect_equal(self) -> None:
        for number in range(len(self.conversations)):
            theirs = {str(worker): depth for (worker, _), depth in self.theirs(number).items()}
            if self.ours(number) != theirs:
                raise SystemExit("the two indexes do not agree")


def join(kvbm: KVBM, worker: int) -> None:
    kvbm.join(
        InstanceDescription(instance_id=str(worker), incarnation=1, model="m", block_tokens=16)
    )


def stored(hashes: Sequence[bytes], parent_hash: bytes = CHAIN_ROOT) -> KVCEvent:
    return Insert(ObjectFact(0, parent_hash, b"".join(hashes)), DEVICE_TIER)


def removed(hashes: Sequence[bytes]) -> KVCEvent:
    return Delete(ObjectFact(0, b"", b"".join(hashes)), DEVICE_TIER)


def lookups(blocks: int, workers: int, rounds: int) -> Figures:
    """Microseconds of one question, the two indexes in turns."""
    note(f"lookups: {blocks} blocks, {workers} workers")
    world = World(blocks, workers)
    if world.peer is not None:
        world.expect_equal()
    ours: list[float] = []
    theirs: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for number in range(len(world.conversations)):
            ours.append(seconds_of(world.ours, number))
            if world.peer is not None:
                theirs.append(seconds_of(world.theirs, number))
    gc.unfreeze()
    figures: Figures = {
        "kvbm_p50_us": percentile(ours, 50) * 1e6,
        "kvbm_p99_us": percentile(ours, 99) * 1e6,
        "segments_per_conversation": len(list(world.places.index(0).walk(world.asked[0], -1))),
    }
    if theirs:
        figures["dynamo_p50_us"] = percentile(theirs, 50) * 1e6
        figures["dynamo_p99_us"] = percentile(theirs, 99) * 1e6
    return figures


def seconds_of(call: Callable[[int], object], number: int) -> float:
    began = time.perf_counter()
    call(number)
    return time.perf_counter() - began


class Ingest:
    """One kind of event, for both indexes, of 16 workers that share their conversations in twos.

    `stored` are events of 128 blocks; `removed` takes the same blocks away again, the tail first,
    `removed_at_once` of them per event.
    """

    def __init__(self, conversations: int, removed_at_once: int = 0) -> None:
        self.before: list[tuple[str, list[KVCEvent]]] = []
        self.timed: list[tuple[str, list[KVCEvent]]] = []
        self.batches: list[tuple[str, bytes]] = []
        self.peer_before: list[tuple[int, bytes]] = []
        self.peer_timed: list[tuple[int, bytes]] = []
        self.blocks = conversations * 2 * CONVERSATION_BLOCKS
        self._coder = Peer() if RadixTree is not None else None
        for number in range(conversations):
            hashes = conversation(f"ingest {number}", CONVERSATION_BLOCKS)
            for worker in (number % 16, (number + 1) % 16):
                self._add(worker, hashes, removed_at_once)

    def _add(self, worker: int, hashes: Conversation, removed_at_once: int) -> None:
        events: list[KVCEvent] = []
        peer_events: list[tuple[int, bytes]] = []
        for start in range(0, len(hashes), EVENT_BLOCKS):
            part = hashes[start : start + EVENT_BLOCKS]
            above = hashes[start - 1] if start else None
            events.append(stored(part, above or CHAIN_ROOT))
            if self._coder is not None:
                peer_events.append((worker, self._coder.stored(part, above)))
        if removed_at_once:
            self.before.append((str(worker), events))
            self.peer_before += peer_events
            events, peer_events = [], []
            for stop in range(len(hashes), 0, -removed_at_once):
                part = hashes[stop - removed_at_once : stop]
                events.append(removed(part))
                if self._coder is not None:
                    peer_events.append((worker, self._coder.removed(part[::-1])))
        self.timed.append((str(worker), events))
        self.peer_timed += peer_events
        batch = Batch(FORMAT_VERSION, str(worker), "m", 1, 0, 0.0, 16, tuple(events))
        self.batches.append((str(worker), encode_message(batch)))

    def _fresh(self) -> KVBM:
        kvbm = KVBM()
        for worker in range(16):
            join(kvbm, worker)
        for name, events in self.before:
            kvbm.process_kvc_events(name, events)
        return kvbm

    def ours(self) -> float:
        kvbm = self._fresh()
        began = time.perf_counter()
        for worker, payload in self.batches:
            batch = decode_published(payload)
            assert isinstance(batch, Batch)
            kvbm.process_kvc_events(worker, batch.events)
        return time.perf_counter() - began

    def ours_without_decode(self) -> float:
        kvbm = self._fresh()
        began = time.perf_counter()
        for worker, events in self.timed:
            kvbm.process_kvc_events(worker, events)
        return time.perf_counter() - began

    def theirs(self) -> float:
        peer = Peer()
        for worker, event in self.peer_before:
            peer.apply(worker, event)
        began = time.perf_counter()
        for worker, event in self.peer_timed:
            peer.apply(worker, event)
        return time.perf_counter() - began


def ingest(conversations: int, repetitions: int) -> tuple[Figures, dict[str, Any]]:
    """Blocks per second by kind of event, and the ratio to the peer."""
    figures: Figures = {}
    bars: dict[str, Any] = {}
    for name, removed_at_once in (("stored", 0), ("removed", EVENT_BLOCKS), ("removed singly", 1)):
        note(f"ingest: {name}")
        stream = Ingest(conversations, removed_at_once)
        calls: dict[str, Callable[[], float | None]] = {
            "kvbm": stream.ours,
            "kvbm_without_decode": stream.ours_without_decode,
        }
        if RadixTree is not None:
            calls["dynamo"] = stream.theirs
        seconds = interleaved(calls, repetitions=repetitions)
        figures[name] = {
            f"{side}_blocks_per_second": stream.blocks / percentile(times, 50)
            for side, times in seconds.items()
        }
        if "dynamo" in seconds:
            ratio = median_ratio(seconds["dynamo"], seconds["kvbm"])
            bars[f"ingest {name}, times dynamo"] = at_least(ratio, 0.5)
    return figures, bars


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(entries: int) -> Figures:
    """Memory of this process for so many distinct blocks, and what the KVBM says that it is."""
    before = resident_bytes()
    kvbm = KVBM(max_entries=entries, max_bytes=1 << 40)
    for worker in range(16):
        join(kvbm, worker)
    began = time.perf_counter()
    run_blocks = 16 * 32  # an object's worth of events, a conversation of 32 of them
    for number in range(entries // run_blocks):
        parent_hash = CHAIN_ROOT
        for part in range(32):
            seed = number.to_bytes(4, "little") + bytes([part])
            run = b"".join(seed.ljust(31, b"\0") + bytes([place]) for place in range(16))
            fact = ObjectFact(0, parent_hash, run)
            for worker in (number % 16, (number + 7) % 16):
                kvbm.process_kvc_events(str(worker), [Insert(fact, DEVICE_TIER)])
            parent_hash = run[-32:]
    took = time.perf_counter() - began
    gc.collect()
    return {
        "entries": kvbm.entry_count,
        "holdings": sum(
            count for state in kvbm.workers.values() for count in state.block_counts.values()
        ),
        "resident_bytes_per_entry": (resident_bytes() - before) / kvbm.entry_count,
        "used_bytes_per_entry": kvbm.used_bytes / kvbm.entry_count,
        "seconds": took,
    }


def memory_in_a_process(entries: int) -> Figures:
    """`memory`, where nothing else has grown the heap."""
    note(f"memory: {entries:,} blocks")
    command = [sys.executable, __file__, "--memory-of", str(entries)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: Figures = json.loads(found.stdout)
    return figures


def side_by_side(*, quick: bool) -> tuple[Figures, dict[str, Any]]:
    """Lookups and ingest, with the peer where there is one."""
    figures: Figures = {"lookup": {}}
    bars: dict[str, Any] = {}
    for blocks, workers in SHAPES:
        found = lookups(blocks, workers, rounds=5 if quick else 40)
        figures["lookup"][f"{blocks}x{workers}"] = found
        for rank in ("p50", "p99") if "dynamo_p50_us" in found else ():
            ratio = found[f"dynamo_{rank}_us"] / found[f"kvbm_{rank}_us"]
            bars[f"lookup {blocks}x{workers} {rank}, times dynamo"] = at_least(ratio, 1.0)
    figures["ingest"], met = ingest(*((40, 2) if quick else (200, 7)))
    return figures, bars | met


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--memory-of", type=int, help="measure the memory of so many blocks alone")
    arguments = options.parse_args()
    if arguments.memory_of:
        sys.stdout.write(json.dumps(memory(arguments.memory_of)))
        return
    facts = machine_facts()
    load = OtherLoad()
    with kept_awake():
        figures, bars = side_by_side(quick=arguments.quick)
    figures["memory"] = memory_in_a_process(1_000_000 if arguments.quick else 10_000_000)
    measured = figures["memory"]["resident_bytes_per_entry"]
    stated = figures["memory"]["used_bytes_per_entry"]
    bars["resident bytes per byte stated"] = at_most(measured / stated, 1.0)
    figures["other_load_cores"] = load.cores()
    emit(arguments, facts=facts, statistic="percentiles, medians", figures=figures, bars=bars)


if __name__ == "__main__":
    main()
