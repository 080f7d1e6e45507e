"""Random use of the books of several attention groups, with the real bytes of every kv group.

The contents are what the events say; what a lookup may answer follows from them by trying every
length, and what a block must hold from its hash, its kv group and its rank.

Mutable state of the machine: the manager, the bytes of every rank, the jobs and the requests.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from fakes import ROW_BYTES, FaultyTier, Row, content, replay
from hybrid_world import (
    full,
    group_hashes,
    hashes_of,
    hybrid_manager,
    layout_of,
    limited_blocks,
    local,
    longest_hit,
    mamba,
    window,
)
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from opal_connector.events import ObjectFact
from opal_connector.keys import AttentionLayout
from opal_connector.managers import (
    BlockTables,
    LookupState,
    OpalKVCacheManager,
    OpalRequest,
    StateBlock,
)
from opal_connector.managers.leases import WAIT_SECONDS
from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows, execute_job
from opal_connector.transfers import FailureKind, JobResult, LoadJob, StoreJob

UNTOUCHED = 0xA5
STRIDE = 128  # blocks of the host per kv group; the first is its null block
LAYOUTS = {
    "full and windows": layout_of(full(2), window(4, 2, 2)),
    "full and smaller blocks of a window": layout_of(full(4), window(6, 2)),
    "full and states": layout_of(full(2, 2), mamba(2, 2)),
    "full, windows and states": layout_of(full(4), window(5, 2, 3), mamba(4)),
    "windows alone": layout_of(window(6, 2, 2)),
    "full and chunks": layout_of(full(2), local(8, 2, 2)),
    "a window and states": layout_of(window(3, 2), mamba(4)),
    "a draft, full and a window": layout_of(full(2, is_draft=True), full(4), window(8, 4)),
}
TOKENS = st.builds(
    lambda length, parting, family: [
        place if place < parting else 100 * family + place for place in range(length)
    ],
    st.sampled_from([32, 32, 24, 20, 16, 9, 3]),
    st.sampled_from([0, 4, 8, 8, 12, 16, 18, 32]),
    st.sampled_from([1, 2]),
)


def oracle(kv_group: int, block_hash: bytes, rank: int) -> Row:
    """What a block of a kv group holds on a rank."""
    return content(bytes([kv_group]) + block_hash, rank)


class Job:
    """A planned job, what its rows hold, and what its ranks still owe."""

    def __init__(
        self, job: LoadJob | StoreJob, ranks: int, wanted: dict[int, tuple[int, bytes]]
    ) -> None:
        self.job = job
        self.wanted = wanted  # by address: the kv group and the hash of the block
        self.to_execute = list(range(ranks))
        self.to_commit: list[JobResult] = []

    @property
    def is_load(self) -> bool:
        return isinstance(self.job, LoadJob)


class HybridMachine(RuleBasedStateMachine):
    """See the module. A subclass says of which layout the model is."""

    layout: AttentionLayout = LAYOUTS["full and windows"]
    requests: Bundle[OpalRequest] = Bundle("requests")
    jobs: Bundle[Job] = Bundle("jobs")

    @initialize(
        chunk_units=st.sampled_from([1, 2, 4]),
        rows=st.integers(12, 90),
        ranks=st.sampled_from([1, 2]),
        save_unfull_chunk=st.sampled_from([True, True, False]),
        stored=st.lists(TOKENS, min_size=1, max_size=3),
    )
    def build(
        self,
        chunk_units: int,
        rows: int,
        ranks: int,
        save_unfull_chunk: bool,
        stored: list[list[int]],
    ) -> None:
        layout = self.layout
        self.manager: OpalKVCacheManager = hybrid_manager(
            layout,
            rows=[rows],
            chunk_tokens=chunk_units * layout.alignment_tokens,
            ranks=ranks,
            save_unfull_chunk=save_unfull_chunk,
        )
        self.memories = [
            CPUMemory(allocate_host_rows(row_count=rows, row_bytes=ROW_BYTES)) for _ in range(ranks)
        ]
        self.contents: dict[tuple[str, bytes], ObjectFact] = {}
        self.corrupted: set[tuple[int, int]] = set()
        self.open: list[Job] = []
        self.live: list[OpalRequest] = []
        self.chance = random.Random(rows)
        self.now = 0.0
        self.request_count = 0
        for tokens in stored:
            self.end_request(self.store_prompt(tokens))

    # ---- requests ----

    @rule(target=requests, tokens=TOKENS)
    def new_request(self, tokens: list[int]) -> OpalRequest:
        self.request_count += 1
        request = self.manager.new_request(f"r{self.request_count}")
        request.extend(tokens)
        self.live.append(request)
        return request

    @rule(request=consumes(requests))
    def end_request(self, request: OpalRequest) -> None:
        self.manager.end_request(request)
        self.live.remove(request)
        self.follow()

    # ---- plans ----

    @rule(
        target=jobs,
        request=requests,
        computed=st.sampled_from([0, 0, 0, 1, 2, 3]),
        fewer=st.sampled_from([0, 0, 1, 3]),
        goes_on=st.sampled_from([True, True, True, False]),
    )
    def look_and_load(self, request: OpalRequest, computed: int, fewer: int, goes_on: bool) -> Any:
        """Ask, and load what was promised into blocks anywhere."""
        layout, block_tokens = self.layout, self.layout.hash_block_tokens
        most = max(0, len(request.chain.hashes) - fewer) * block_tokens
        computed_tokens = min(computed * layout.alignment_tokens, most - most % block_tokens)
        computed_tokens -= computed_tokens % layout.alignment_tokens
        idle, there = self.expect(request, computed_tokens, most)

        result = self.manager.lookup(
            request,
            computed_blocks=computed_tokens // block_tokens,
            max_blocks=most // block_tokens,
            now=self.now,
        )

        self.follow()
        tokens = computed_tokens + result.block_count * block_tokens
        if result.state is LookupState.WAIT:
            assert self.is_coming() or idle < there, "waits for nothing"
            return multiple()
        assert idle <= tokens <= there, "not the longest length"
        assert sum(result.tier_tokens.values()) == tokens - computed_tokens
        if result.state is LookupState.MISS or not goes_on:
            return multiple()
        return self.load(request, computed_tokens, tokens)

    def load(self, request: OpalRequest, computed_tokens: int, tokens: int) -> Job:
        block_tokens = self.layout.hash_block_tokens
        tables = self.tables(tokens, tokens)
        wanted = self.addresses(request, tables, computed_tokens, tokens)

        job = self.manager.plan_load(
            request,
            tables,
            first_block=computed_tokens // block_tokens,
            block_count=(tokens - computed_tokens) // block_tokens,
        )

        filled = [address for item in job.objects for address in item.block_ids]
        assert sorted(filled) == sorted(wanted), "not exactly what the hit needs"
        assert job.missing_block_ids == ()
        loading = {key for other in self.open if other.is_load for key in self.rows_of(other)}
        planned = Job(job, len(self.memories), wanted)
        assert not loading & set(self.rows_of(planned)), "an object is loaded twice at once"
        self.open.append(planned)
        self.follow()
        return planned

    @rule(
        target=jobs,
        request=requests,
        fewer=st.sampled_from([0, 0, 0, 1, 2]),
        include_tail=st.booleans(),
        is_nulled=st.booleans(),
        max_blocks=st.sampled_from([None, None, None, 3, 8]),
    )
    def store(
        self,
        request: OpalRequest,
        fewer: int,
        include_tail: bool,
        is_nulled: bool,
        max_blocks: int | None,
    ) -> Any:
        full_blocks = max(0, len(request.chain.hashes) - fewer)
        tokens = full_blocks * self.layout.hash_block_tokens
        tables = self.tables(tokens, tokens if is_nulled else 0)
        wanted = self.addresses(request, tables, 0, tokens)
        states = self.states(request, tokens, wanted)
        held = self.held_rows()

        job = self.manager.plan_store(
            request,
            full_blocks=full_blocks,
            tables=tables,
            include_tail=include_tail,
            states=states,
            max_blocks=max_blocks,
        )

        self.follow()
        assert held <= self.held_rows(), "what was promised has gone"
        if job is None:
            return multiple()
        addresses = [address for item in job.objects for address in item.block_ids]
        assert len(addresses) == len(set(addresses))
        assert all(address % STRIDE for address in addresses), "a null block is stored"
        assert max_blocks is None or limited_blocks(job, self.manager.layout) <= max_blocks
        planned = Job(job, len(self.memories), {address: wanted[address] for address in addresses})
        self.open.append(planned)
        return planned

    @rule(target=requests, tokens=TOKENS)
    def store_prompt(self, tokens: list[int]) -> OpalRequest:
        """A prompt that is computed in steps of which each is stored at once."""
        request = self.new_request(tokens)
        for fewer in (len(request.chain.hashes) // 2, 0):
            job = self.store(request, fewer, fewer == 0, False, None)
            if isinstance(job, Job):
                self.finish(job)
        return request

    @rule(target=jobs, tokens=TOKENS, computed=st.sampled_from([0, 0, 1]))
    def load_prompt(self, tokens: list[int], computed: int) -> Any:
        """A request that looks up and begins to load, as it mostly goes."""
        request = self.new_request(tokens)
        job = self.look_and_load(request, computed, 0, True)
        self.end_request(request)
        return job

    # ---- execute and commit ----

    @rule(job=jobs, rank=st.integers(0, 1), faults=st.sampled_from([(), (), (), (0,), (1, 2)]))
    def execute(self, job: Job, rank: int, faults: tuple[int, ...]) -> None:
        if rank not in job.to_execute:
            return
        job.to_execute.remove(rank)
        objects = job.job.objects
        count = STRIDE * self.layout.kv_group_count
        paged = ArrayBlocks(np.full((count, ROW_BYTES), UNTOUCHED, dtype=np.uint8))
        if not job.is_load:
            for address, (kv_group, block_hash) in job.wanted.items():
                paged.blocks[address] = oracle(kv_group, block_hash, rank)
        bad = {row for place in faults if place < len(objects) for row in objects[place].tier_rows}
        tier = FaultyTier(
            self.memories[rank],
            lambda item: OSError("fault") if bad & set(item.tier_rows) else None,
        )
        result = execute_job(job.job, tiers=[tier], paged=paged, rank=rank)
        job.to_commit.append(result)
        if job.is_load:
            self.check_load(job, rank, paged, result, faults)
        else:
            for position, item in enumerate(objects):
                if position not in result.failed:
                    self.corrupted -= {(rank, row) for row in item.tier_rows}

    def check_load(
        self, job: Job, rank: int, paged: ArrayBlocks, result: JobResult, faults: Sequence[int]
    ) -> None:
        """Every block holds what it must, or is untouched and said to have failed."""
        expected: dict[int, FailureKind] = {}
        for position, item in enumerate(job.job.objects):
            if expected:
                expected[position] = FailureKind.AFTER_FAILURE
            elif position in faults:
                expected[position] = FailureKind.IO
            elif self.corrupted & {(rank, row) for row in item.tier_rows}:
                expected[position] = FailureKind.CHECKSUM
        assert result.failed == expected
        for position, item in enumerate(job.job.objects):
            for address in item.block_ids:
                block = paged.blocks[address]
                is_right = np.array_equal(block, oracle(*job.wanted[address], rank))
                is_untouched = bool(np.all(block == UNTOUCHED))
                assert is_right or (position in result.failed and is_untouched), "wrong bytes"
        others = np.ones(len(paged.blocks), dtype=bool)
        others[list(job.wanted)] = False
        assert np.all(paged.blocks[others] == UNTOUCHED), "a block that nobody asked for"

    @rule(job=jobs)
    def commit(self, job: Job) -> None:
        if job.to_commit:
            ended = self.manager.commit(job.to_commit.pop(0))
            assert (ended is not None) == (not job.to_execute and not job.to_commit)
            if ended is not None:
                self.open.remove(job)
            self.follow()

    @rule(job=jobs)
    def finish(self, job: Job) -> None:
        for rank in list(job.to_execute):
            self.execute(job, rank, ())
        while job.to_commit:
            self.commit(job)

    # ---- faults and time ----

    @rule(rank=st.integers(0, 1), place=st.integers(0, 1 << 16), offset=st.integers(0, 23))
    def corrupt(self, rank: int, place: int, offset: int) -> None:
        rows = sorted(row for row, *_ in self.named_rows())
        if rows and rank < len(self.memories):
            row = rows[place % len(rows)]
            if (rank, row) not in self.corrupted and row not in self.rows_in_motion():
                self.memories[rank].rows[row, offset] ^= 1
                self.corrupted.add((rank, row))

    @rule(seconds=st.sampled_from([0.1, WAIT_SECONDS, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)
        self.follow()

    @rule(now=st.sampled_from([False, False, False, True]))
    def reset(self, now: bool) -> None:
        if now:
            self.manager.reset()
            self.follow()
            assert self.contents == {}

    # ---- what must be so ----

    def follow(self) -> None:
        replay(self.contents, self.manager.take_events())

    @invariant()
    def books_are_right(self) -> None:
        """Every auditor agrees, and the events add up to what is there."""
        if hasattr(self, "manager"):
            self.manager.check()
            assert set(self.contents) == set(self.manager.storage.placements())
            (tier,) = self.manager.storage.tiers
            assert tier.used_bytes <= tier.capacity_bytes

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        """The rows of what can be read hold the blocks of all kv groups, member by member."""
        if not hasattr(self, "manager"):
            return
        for row, kv_group, block_hash in self.named_rows():
            for rank, memory in enumerate(self.memories):
                if (rank, row) not in self.corrupted:
                    assert np.array_equal(memory.rows[row], oracle(kv_group, block_hash, rank))

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for job in list(self.open):
            self.finish(job)
        for request in list(self.live):
            self.manager.end_request(request)
        self.follow()
        self.manager.check()
        assert (self.manager.lease_count, self.manager.open_job_count) == (0, 0)
        (tier,) = self.manager.storage.tiers
        assert tier.used_bytes == ROW_BYTES * sum(1 for _ in self.named_rows())
        self.manager.reset()
        assert tier.used_bytes == 0

    # ---- helpers ----

    def tables(self, tokens: int, seen_tokens: int) -> BlockTables:
        """Blocks for so many tokens, without those that nothing behind `seen_tokens` looks at."""
        tables: list[list[int]] = []
        for group in self.layout.groups:
            first = group.skipped_tokens(seen_tokens) // group.block_tokens
            count = -(-tokens // group.block_tokens)
            for _ in group.kv_groups:
                numbers = self.chance.sample(range(1, STRIDE // 2), count)
                tables.append([0 if block < first else numbers[block] for block in range(count)])
        return BlockTables(tuple(tables), group_stride=STRIDE, null_block=0)

    def addresses(
        self, request: OpalRequest, tables: BlockTables, first_token: int, tokens: int
    ) -> dict[int, tuple[int, bytes]]:
        """The blocks of these tokens that the host has, by address."""
        found: dict[int, tuple[int, bytes]] = {}
        for place, group in enumerate(self.layout.groups):
            hashes = group_hashes(self.layout, request.chain, place)
            blocks = range(first_token // group.block_tokens, tokens // group.block_tokens)
            for kv_group in group.kv_groups:
                for block in blocks:
                    number = tables.tables[kv_group][block]
                    if number:
                        found[kv_group * STRIDE + number] = kv_group, hashes[block]
        return found

    def states(
        self, request: OpalRequest, tokens: int, wanted: dict[int, tuple[int, bytes]]
    ) -> list[StateBlock]:
        """States that the host hands over, sometimes not of all members; adds their contents."""
        states: list[StateBlock] = []
        for place, group in enumerate(self.layout.groups):
            if group.retention != "last":
                continue
            hashes = group_hashes(self.layout, request.chain, place)
            for block in range(tokens // group.block_tokens):
                if self.chance.random() < 0.4:
                    continue
                boundary = (block + 1) * group.block_tokens
                number = STRIDE // 2 + block
                for kv_group in group.kv_groups:
                    if self.chance.random() < 0.1:
                        continue
                    states.append(StateBlock(kv_group, number, boundary))
                    wanted[kv_group * STRIDE + number] = kv_group, hashes[block]
        return states

    def rows_of(self, job: Job) -> list[int]:
        return [row for item in job.job.objects for row in item.tier_rows]

    def rows_in_motion(self) -> set[int]:
        return {row for job in self.open for row in self.rows_of(job)}

    def held_rows(self) -> set[tuple[bytes, int]]:
        """The objects that somebody was promised, by key and first row."""
        return {
            (segment.record.key, segment.record.rows[0])
            for request in self.live
            for segment in (request.lease.segments if request.lease is not None else ())
            if self.manager.storage.tiers[0].index.is_current(segment.record)
        }

    def named_rows(self) -> Iterator[tuple[int, int, bytes]]:
        """The rows of what can be read, with the kv group and the block that each holds."""
        for tier in self.manager.storage.tiers:
            for key in tier.index.readable_keys():
                record = tier.index.records[key]
                hashes = hashes_of(record.run)
                for place, row in enumerate(record.rows):
                    member, block = divmod(place, len(hashes))
                    yield row, self.layout.groups[record.group].kv_groups[member], hashes[block]

    def is_coming(self) -> bool:
        records = self.manager.storage.tiers[0].index.records.values()
        return any(not record.is_readable for record in records)

    def expect(self, request: OpalRequest, computed_tokens: int, most: int) -> tuple[int, int]:
        """The longest length of what is idle, and of all that the events say is there."""
        there: dict[int, set[bytes]] = {group: set() for group in range(len(self.layout.groups))}
        for fact in self.contents.values():
            there[fact.group].update(hashes_of(fact.block_hashes))
        rows = self.rows_in_motion()
        loading = {  # all of an object, also if only a part of it is loaded
            block_hash
            for record in self.manager.storage.tiers[0].index.records.values()
            if record.is_readable and rows & set(record.rows)
            for block_hash in hashes_of(record.run)
        }
        idle = {group: set(blocks) for group, blocks in there.items()}
        for group, manager in enumerate(self.manager.coordinator.managers):
            hashes = group_hashes(self.layout, request.chain, group)
            for first in range(0, len(hashes), manager.chunk_blocks):
                unit = hashes[first : first + manager.chunk_blocks]
                if loading & set(unit):
                    idle[group] -= set(unit)
        edges = {"computed_tokens": computed_tokens, "most_tokens": most}
        least = longest_hit(self.layout, request.chain, idle, **edges)
        return least, longest_hit(self.layout, request.chain, there, **edges)
