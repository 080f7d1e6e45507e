"""Random use of the books with real bytes, beside a model that recomputes everything.

The model knows only what the event log says: contents are the replay of all events. What a lookup
may answer, what a load must bring and what may leave follow from them by looking at everything.

Mutable state of the machine: the manager, the bytes of every rank, and the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from book_model import BLOCKS, Contents, Job, Writes, hashes_of, promised_rows, rows_at_rest
from fakes import ROW_BYTES, FaultyTier, content, make_manager, plan_load, tokens_of
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

from opal_connector.events import Delete, Insert, KVCEvent
from opal_connector.keys import CHAIN_ROOT, HASH_BYTES
from opal_connector.managers import (
    LookupState,
    OpalKVCacheManager,
    OpalRequest,
    object_key,
    one_table,
)
from opal_connector.managers.leases import LEASE_SECONDS, WAIT_SECONDS
from opal_connector.tiers import ArrayBlocks, CPUMemory, allocate_host_rows, execute_job
from opal_connector.transfers import FailureKind, JobResult

UNTOUCHED = 0xA5


class BookMachine(RuleBasedStateMachine):
    """See the module."""

    requests: Bundle[OpalRequest] = Bundle("requests")
    jobs: Bundle[Job] = Bundle("jobs")

    @initialize(
        chunk_blocks=st.sampled_from([1, 2, 4]),
        rows=st.integers(4, 12),
        ranks=st.sampled_from([1, 2]),
        save_unfull_chunk=st.sampled_from([True, True, True, False]),
        stored=st.lists(BLOCKS, min_size=1, max_size=3),
    )
    def build(
        self,
        chunk_blocks: int,
        rows: int,
        ranks: int,
        save_unfull_chunk: bool,
        stored: list[list[int]],
    ) -> None:
        self.chunk_blocks = chunk_blocks
        self.manager: OpalKVCacheManager = make_manager(
            rows=rows,
            chunk_blocks=chunk_blocks,
            ranks=ranks,
            save_unfull_chunk=save_unfull_chunk,
        )
        self.memories = [
            CPUMemory(allocate_host_rows(row_count=rows, row_bytes=ROW_BYTES)) for _ in range(ranks)
        ]
        self.contents = Contents()
        self.writes = Writes()
        self.corrupted: set[tuple[int, int]] = set()  # (rank, row) that we damaged
        self.open: list[Job] = []
        self.live: list[OpalRequest] = []
        self.blocks: dict[str, list[int]] = {}
        self.questions: dict[str, tuple[int, int]] = {}  # of the last lookup: computed, fewer
        # What the last lookup promised: computed blocks, blocks, deadline, stays of the objects.
        self.promises: dict[str, tuple[int, int, float, frozenset[int]]] = {}
        self.now = 0.0
        self.epoch = 0  # resets so far
        self.request_count = 0
        for blocks in stored:
            self.end_request(self.store_prompt(blocks))

    # ---- requests ----

    @rule(target=requests, blocks=BLOCKS)
    def new_request(self, blocks: list[int]) -> OpalRequest:
        self.request_count += 1
        request = self.manager.new_request(f"r{self.request_count}")
        request.extend(tokens_of(blocks))
        self.blocks[request.request_id] = list(blocks)
        self.live.append(request)
        return request

    @rule(request=requests, more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, request: OpalRequest, more: list[int]) -> None:
        blocks = self.blocks[request.request_id]
        if len(blocks) < 12:
            blocks.extend(more)
            request.extend(tokens_of(blocks))

    @rule(request=consumes(requests))
    def end_request(self, request: OpalRequest) -> None:
        self.manager.end_request(request)
        self.promises.pop(request.request_id, None)
        self.live.remove(request)
        self.after_step()

    @rule(request=requests)
    def release(self, request: OpalRequest) -> None:
        self.manager.release(request)
        self.promises.pop(request.request_id, None)
        self.after_step()

    # ---- lookups ----

    @rule(
        request=requests,
        computed=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 6]),
        fewer=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def lookup(self, request: OpalRequest, computed: int, fewer: int) -> None:
        hashes = request.chain.hashes
        computed = min(computed, len(hashes))
        limit = max(0, len(hashes) - fewer)
        self.questions[request.request_id] = (computed, fewer)
        may_wait = request.waiting_since is None or self.now - request.waiting_since < WAIT_SECONDS
        lower, upper, total, is_coming = self.expect(hashes, computed, limit)

        result = self.manager.lookup(
            request, computed_blocks=computed, max_blocks=limit, now=self.now
        )

        self.promises.pop(request.request_id, None)
        if result.state is LookupState.WAIT:
            assert may_wait, "waits longer than its bound"
            assert is_coming or lower < total, "waits for nothing"
            assert result.block_count == 0
        else:
            assert not (may_wait and (is_coming or upper < total)), "does not wait"
            assert lower <= result.block_count <= upper
            assert (result.state is LookupState.HIT) == (result.block_count > 0)
            stays = self.stays_of_lease(request)
            deadline = self.now + LEASE_SECONDS
            self.promises[request.request_id] = (computed, result.block_count, deadline, stays)
        block_tokens = self.manager.database.block_tokens
        assert sum(result.tier_tokens.values()) == result.block_count * block_tokens
        self.after_step()

    @rule(request=requests)
    def ask_again(self, request: OpalRequest) -> None:
        """The same question once more, as vLLM asks it every step until there is room."""
        computed, fewer = self.questions.get(request.request_id, (0, 0))
        self.lookup(request, computed, fewer)

    def expect(
        self, hashes: Sequence[bytes], computed: int, limit: int
    ) -> tuple[int, int, int, bool]:
        """See `Contents.expect`, and whether a write in motion brings the block behind it."""
        busy = {stay for job in self.open if job.is_load for stay in job.stays}
        lower, upper, total = self.contents.expect(
            hashes, computed, limit, chunk_blocks=self.chunk_blocks, busy=busy
        )
        end = computed + total
        return lower, upper, total, end < limit and hashes[end] in self.writes.coming()

    def stays_of_lease(self, request: OpalRequest) -> frozenset[int]:
        segments = request.lease.segments if request.lease is not None else ()
        return frozenset(
            self.contents.born[self.manager.tier_names[segment.tier], segment.record.key]
            for segment in segments
        )

    # ---- plans ----

    @rule(target=jobs, request=requests, extra=st.sampled_from([0, 0, 0, -1, -3, 2]))
    def plan_load(self, request: OpalRequest, extra: int) -> Any:
        """Ask, then load what was promised, in one go as a host does."""
        self.ask_again(request)
        computed, promised, _, _ = self.promises.pop(request.request_id, (0, 0, 0.0, frozenset()))
        count = max(0, promised + extra)
        ids = range(1000, 1000 + count)
        job = plan_load(self.manager, request, ids, computed)

        covered = [block_id for item in job.objects for block_id in item.block_ids]
        assert covered == list(ids[:promised]), "a promise was not kept"
        assert list(job.missing_block_ids) == list(ids[promised:])
        stamps = b"".join(item.stamps for item in job.objects)
        assert hashes_of(stamps) == request.chain.hashes[computed : computed + len(covered)]
        stays = [self.contents.stay_of(item, self.manager) for item in job.objects]
        planned = Job(job, len(self.memories), self.epoch, stays=stays)
        busy = [stay for other in self.open if other.is_load for stay in other.stays]
        assert not set(busy) & set(stays), "an object is loaded twice at once"
        self.open.append(planned)
        self.after_step()
        return planned

    @rule(
        target=jobs,
        request=requests,
        fewer=st.sampled_from([0, 0, 0, 1, 2]),
        include_tail=st.booleans(),
        max_blocks=st.sampled_from([None, None, 2, 5]),
    )
    def plan_store(
        self, request: OpalRequest, fewer: int, include_tail: bool, max_blocks: int | None
    ) -> Any:
        full_blocks = max(0, len(request.chain.hashes) - fewer)
        job = self.manager.plan_store(
            request,
            full_blocks=full_blocks,
            tables=one_table(range(full_blocks)),
            include_tail=include_tail,
            tokens=tokens_of(self.blocks[request.request_id]),
            max_blocks=max_blocks,
        )
        self.after_step(spared=self.in_use())
        if job is None:
            return multiple()
        blocks = [block_id for item in job.objects for block_id in item.block_ids]
        assert len(blocks) == len(set(blocks))
        assert max_blocks is None or len(blocks) <= max_blocks
        for item in job.objects:
            names = [request.chain.hashes[block_id] for block_id in item.block_ids]
            assert item.stamps == b"".join(names), "a block is stored under another's name"
        hashes = [CHAIN_ROOT, *request.chain.hashes]  # one earlier: the parents
        parents = [hashes[item.block_ids[0]] for item in job.objects]
        for item in job.objects:
            self.writes.begin(item.stamps)
        planned = Job(job, len(self.memories), self.epoch, parents=parents)
        self.open.append(planned)
        return planned

    def in_use(self) -> frozenset[int]:
        """Stays that are promised or being loaded: a store must not evict them."""
        stays = {stay for promise in self.promises.values() for stay in promise[3]}
        stays.update(stay for job in self.open if job.is_load for stay in job.stays)
        return frozenset(stays)

    # ---- execute and commit ----

    @rule(job=jobs, rank=st.integers(0, 1), faults=st.sampled_from([(), (), (), (), (0,), (1, 2)]))
    def execute(self, job: Job, rank: int, faults: tuple[int, ...]) -> None:
        if rank in job.to_execute:
            job.to_execute.remove(rank)
            if job.is_load:
                self.execute_load(job, rank, faults)
            else:
                self.execute_store(job, rank, faults)

    def execute_store(self, job: Job, rank: int, faults: Sequence[int]) -> None:
        objects = job.job.objects
        paged = ArrayBlocks(np.zeros((16, ROW_BYTES), dtype=np.uint8))
        for item in objects:
            for block_id, stamp in zip(item.block_ids, hashes_of(item.stamps), strict=True):
                paged.blocks[block_id] = content(stamp, rank)
        result = self.run(job, rank, paged, faults)
        assert result.failed == {
            position: FailureKind.IO for position in faults if position < len(objects)
        }
        for position, item in enumerate(objects):
            if position not in result.failed:
                self.corrupted -= {(rank, row) for row in item.tier_rows}

    def execute_load(self, job: Job, rank: int, faults: Sequence[int]) -> None:
        objects = job.job.objects
        paged = ArrayBlocks(np.full((1016, ROW_BYTES), UNTOUCHED, dtype=np.uint8))
        expected: dict[int, FailureKind] = {}
        for position, item in enumerate(objects):
            if expected:
                expected[position] = FailureKind.AFTER_FAILURE
            elif position in faults:
                expected[position] = FailureKind.IO
            elif self.corrupted & {(rank, row) for row in item.tier_rows}:
                expected[position] = FailureKind.CHECKSUM

        result = self.run(job, rank, paged, faults)

        assert result.failed == expected
        for position, item in enumerate(objects):
            for block_id, stamp in zip(item.block_ids, hashes_of(item.stamps), strict=True):
                block = paged.blocks[block_id]
                is_right = np.array_equal(block, content(stamp, rank))
                is_untouched = bool(np.all(block == UNTOUCHED))
                assert is_right or (position in result.failed and is_untouched), "wrong bytes"

    def run(self, job: Job, rank: int, paged: ArrayBlocks, faults: Sequence[int]) -> JobResult:
        rows = {
            row
            for position in faults
            if position < len(job.job.objects)
            for row in job.job.objects[position].tier_rows
        }
        tier = FaultyTier(
            self.memories[rank],
            lambda item: OSError("fault") if rows & set(item.tier_rows) else None,
        )
        result = execute_job(job.job, tiers=[tier], paged=paged, rank=rank)
        job.to_commit.append(result)
        return result

    @rule(job=jobs)
    def commit(self, job: Job) -> None:
        if not job.to_commit:
            return
        result = job.to_commit.pop(0)
        job.answers_left -= 1
        for position, kind in result.failed.items():
            job.failed.setdefault(position, set()).add(kind)
        there = {fact.chunk_hash for fact in self.contents.facts.values()}
        ended = self.manager.commit(result)
        assert (ended is not None) == (job.answers_left == 0), "every rank must answer"
        if job.answers_left:
            self.after_step()
            assert not self.last_events
            return
        self.open.remove(job)
        if job.is_load:
            self.end_load(job)
        else:
            self.end_store(job, there)

    def end_load(self, job: Job) -> None:
        bad = {
            job.stays[position]
            for position, kinds in job.failed.items()
            if kinds - {FailureKind.AFTER_FAILURE, FailureKind.MISSING}
        }
        there = bad & set(self.contents.born.values())
        self.after_step(orphans=True)
        assert set(self.last_deleted) == there, "exactly what is damaged is taken out"
        assert not any(isinstance(event, Insert) for event in self.last_events)

    def end_store(self, job: Job, there: set[bytes]) -> None:
        published: list[bytes] = []
        for position, item in enumerate(job.job.objects if job.epoch == self.epoch else ()):
            published += self.writes.end(
                item.stamps,
                job.parents[position],
                stored=position not in job.failed,
                there=there | {run[-HASH_BYTES:] for run in published},
            )
        self.after_step()
        inserted = {e.fact.block_hashes for e in self.last_events if isinstance(e, Insert)}
        assert inserted <= set(published), "what failed, waits, or was reset, is there"
        blocks = {block for run in published for block in hashes_of(run)}
        assert blocks <= self.contents.blocks(), "what was stored is not there"

    @rule(job=jobs)
    def finish(self, job: Job) -> None:
        """All ranks at once, as it mostly goes."""
        for rank in list(job.to_execute):
            self.execute(job, rank, ())
        while job.to_commit:
            self.commit(job)

    @rule(target=requests, blocks=BLOCKS)
    def store_prompt(self, blocks: list[int]) -> OpalRequest:
        """A request whose prompt is stored at once, as it mostly goes."""
        request = self.new_request(blocks)
        job = self.plan_store(request, 0, True, None)
        if isinstance(job, Job):
            self.finish(job)
        return request

    @rule(target=jobs, blocks=BLOCKS, faults=st.sampled_from([(), (), (0,)]))
    def store_tail_first(self, blocks: list[int], faults: tuple[int, ...]) -> Any:
        """A prompt in two jobs, of which the second ends first; the first may fail."""
        request = self.new_request(blocks)
        head = self.plan_store(request, 0, False, self.chunk_blocks)
        tail = self.plan_store(request, 0, True, None)
        self.end_request(request)
        if isinstance(tail, Job):
            self.finish(tail)
        if not isinstance(head, Job):
            return multiple()
        self.execute(head, 0, faults)
        return head

    @rule(target=jobs, blocks=BLOCKS)
    def load_prompt(self, blocks: list[int]) -> Any:
        """A request that looks up and begins to load, as it mostly goes."""
        request = self.new_request(blocks)
        job = self.plan_load(request, 0)
        self.end_request(request)
        return job

    # ---- faults and time ----

    @rule(data=st.data(), rank=st.integers(0, 1), offset=st.integers(0, ROW_BYTES - 1))
    def corrupt(self, data: st.DataObject, rank: int, offset: int) -> None:
        rows = sorted({row for rows in rows_at_rest(self.manager).values() for row in rows})
        if rows and rank < len(self.memories):
            row = data.draw(st.sampled_from(rows))
            if (rank, row) not in self.corrupted:
                self.memories[rank].rows[row, offset] ^= 1
                self.corrupted.add((rank, row))

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 70.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)
        self.promises = {
            name: promise for name, promise in self.promises.items() if promise[2] >= self.now
        }
        self.after_step()

    @rule(now=st.sampled_from([False] * 7 + [True]))
    def reset(self, now: bool) -> None:
        if not now:
            return  # a reset is rare, or nothing ever becomes full
        self.manager.reset()
        self.epoch += 1
        self.writes.clear()
        self.promises.clear()
        self.after_step(orphans=True)
        assert self.contents.facts == {}

    # ---- after every step ----

    def after_step(self, *, orphans: bool = False, spared: frozenset[int] = frozenset()) -> None:
        """Replay what was logged; `orphans` allows a parent to leave before its child."""
        self.last_events: list[KVCEvent] = self.manager.take_events()
        self.last_deleted: list[int] = []
        for event in self.last_events:
            assert isinstance(event, Insert | Delete)
            fact = event.fact
            key = event.tier, object_key(fact.chunk_hash, fact.group)
            if isinstance(event, Insert):
                self.contents.insert(key, fact)
                continue
            self.last_deleted.append(self.contents.delete(key, fact))
            children = [
                other
                for other in self.contents.facts.values()
                if other.parent_hash == fact.chunk_hash
            ]
            assert orphans or not children, "a head left before its tail"
        assert not spared & set(self.last_deleted), "evicted while promised or loaded"
        self.on_events(self.last_events)

    def on_events(self, events: Sequence[KVCEvent]) -> None:
        """For machines that look at the events in another way."""

    @invariant()
    def books_are_right(self) -> None:
        """Every auditor agrees; used is at most the limit and at least what can be had (I1)."""
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        (tier,) = self.manager.storage.tiers
        blocks = sum(len(fact.block_hashes) for fact in self.contents.facts.values()) // HASH_BYTES
        assert blocks * ROW_BYTES <= tier.used_bytes <= tier.capacity_bytes

    @invariant()
    def events_are_the_contents(self) -> None:
        """Replaying all events gives exactly what the tiers hold (I2)."""
        if hasattr(self, "manager"):
            assert set(self.contents.facts) == set(self.manager.storage.placements())

    @invariant()
    def bytes_are_what_was_written(self) -> None:
        """Rows that are readable, promised or being loaded hold their block's KV (I3, I5)."""
        if not hasattr(self, "manager"):
            return
        for row, stamp in self.named_rows():
            for rank, memory in enumerate(self.memories):
                if (rank, row) not in self.corrupted:
                    assert np.array_equal(memory.rows[row], content(stamp, rank)), row

    def named_rows(self) -> Iterator[tuple[int, bytes]]:
        """Rows and the hash of the block that each must hold now."""
        for key, rows in rows_at_rest(self.manager).items():
            yield from zip(rows, hashes_of(self.contents.facts[key].block_hashes), strict=True)
        yield from promised_rows(self.live, self.open)

    def teardown(self) -> None:
        """End everything: what is left is what can be had, and nothing is promised (I8)."""
        if not hasattr(self, "manager"):
            return
        for job in list(self.open):
            for rank in list(job.to_execute):
                self.execute(job, rank, ())
            while job.to_commit:
                self.commit(job)
        for request in list(self.live):
            self.manager.end_request(request)
        self.after_step()
        self.manager.check()
        assert (self.manager.lease_count, self.manager.open_job_count) == (0, 0)
        (tier,) = self.manager.storage.tiers
        assert tier.used_bytes == ROW_BYTES * sum(map(len, rows_at_rest(self.manager).values()))
        assert self.writes.coming() == set()
        self.manager.reset()
        self.after_step(orphans=True)
        assert tier.used_bytes == 0
