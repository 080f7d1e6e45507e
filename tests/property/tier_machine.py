"""Random use of the books over memory and two tiers of files, beside a model of what is where.

No byte moves here: a row or a file of the world holds the hashes of the blocks that were put
there. Jobs of all kinds are executed by the machine, in any order, in parts that fail or are never
begun. What the world then holds must be what the books say, whatever happened on the way.

Mutable state of the machine: the manager, the world of every rank, and the model.
"""

from collections.abc import Iterable, Sequence

from book_model import BLOCKS, hashes_of
from fakes import plan_load, replay, tokens_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tier_world import TIERS, World, file_bytes, tiered_manager

from opal_connector.events import Copy, Delete, Insert, KVCEvent, Move, ObjectFact
from opal_connector.managers import LookupState, OpalKVCacheManager, OpalRequest, one_table
from opal_connector.managers.leases import WAIT_SECONDS
from opal_connector.transfers import FailureKind, ObjectName, TierHealth

SPARE_BYTES = 20  # of every tier of files, for what others have: no object fits into it
ROUNDS = 200  # of work and commit until everything must have come to rest
WRITES = st.sampled_from(["through", "demote", "off"])
RARELY = st.sampled_from([False] * 15 + [True])  # or nothing ever becomes full
FAULTS = st.sampled_from([None, None, None, None, FailureKind.IO, FailureKind.TIMEOUT])


class TierMachine(RuleBasedStateMachine):
    """See the module."""

    @initialize(
        chunk_blocks=st.sampled_from([1, 2, 4]),
        memory_blocks=st.integers(4, 10),
        disk_blocks=st.integers(4, 12),
        shared_blocks=st.integers(4, 16),
        ranks=st.sampled_from([1, 1, 2]),
        writes=st.tuples(WRITES, WRITES),
        admission=st.sampled_from(["always", "adaptive"]),
        foreign=st.tuples(*[st.integers(0, SPARE_BYTES)] * 2),
        stored=st.lists(BLOCKS, min_size=1, max_size=3),
    )
    def build(
        self,
        chunk_blocks: int,
        memory_blocks: int,
        disk_blocks: int,
        shared_blocks: int,
        ranks: int,
        writes: tuple[str, str],
        admission: str,
        foreign: tuple[int, int],
        stored: list[list[int]],
    ) -> None:
        self.chunk_blocks = chunk_blocks
        self.memory_blocks = memory_blocks
        self.capacities = (disk_blocks, shared_blocks)
        self.writes, self.admission = writes, admission
        self.foreign = foreign[:ranks]  # bytes beside what the ranks have, as each reports
        self.world = World(ranks)
        self.now = 0.0
        self.request_count = 0
        self.begin()
        self.open_tiers(len(self.pages))
        for blocks in stored:
            self.store(blocks, True, True)
            self.settle_down(None)

    # ---- life of the process ----

    @rule(when=RARELY, opens=st.booleans())
    def restart(self, when: bool, opens: bool) -> None:
        """Another process with what the files hold; what was in motion is lost half-way."""
        if when:
            self.begin()
            if opens:
                self.open_tiers(len(self.pages))

    def begin(self) -> None:
        self.manager: OpalKVCacheManager = tiered_manager(
            memory_blocks=self.memory_blocks,
            file_tier_bytes=self.file_tier_bytes(),
            writes=self.writes,
            chunk_blocks=self.chunk_blocks,
            ranks=len(self.world.ranks),
            admission=self.admission,
        )
        self.world.forget()
        self.live: list[OpalRequest] = []
        self.contents: dict[tuple[str, bytes], ObjectFact] = {}
        self.health = [list([TierHealth.OK] * 3) for _ in self.world.ranks]
        self.pages = [
            page
            for place in (1, 2)
            for rank in range(len(self.world.ranks))
            for page in self.world.pages(place, rank, self.foreign[rank])
        ]

    def file_tier_bytes(self) -> list[int]:
        return [
            blocks // self.chunk_blocks * file_bytes(self.chunk_blocks) + SPARE_BYTES
            for blocks in self.capacities
        ]

    @rule(count=st.integers(1, 8))
    def open_tiers(self, count: int) -> None:
        for page in self.pages[:count]:
            self.manager.adopt(page)
        del self.pages[:count]
        self.follow()

    # ---- requests ----

    def new_request(self, blocks: list[int]) -> OpalRequest:
        self.request_count += 1
        request = self.manager.new_request(f"r{self.request_count}")
        request.extend(tokens_of(blocks))
        self.live.append(request)
        return request

    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        if self.live:
            request = data.draw(st.sampled_from(self.live))
            self.live.remove(request)
            self.manager.end_request(request)
            self.follow()

    @rule(blocks=BLOCKS, computed=st.sampled_from([0, 0, 0, 1, 2]), is_aborted=st.booleans())
    def look_and_load(self, blocks: list[int], computed: int, is_aborted: bool) -> None:
        """A request that looks up what there is, and loads it or goes away."""
        request = self.new_request(blocks)
        hashes = request.chain.hashes
        computed = min(computed, len(hashes))
        lower, total = self.expect(hashes, computed)
        is_coming = self.is_coming()

        result = self.manager.lookup(
            request, computed_blocks=computed, max_blocks=len(hashes), now=self.now
        )

        if result.state is LookupState.WAIT:
            assert is_coming or lower < total, "waits for nothing"
        else:
            assert lower <= result.block_count <= total, "not the longest prefix"
        self.follow()
        if is_aborted or result.state is not LookupState.HIT:
            return
        job = plan_load(self.manager, request, range(1000, 1000 + result.block_count), computed)
        covered = [block_id for item in job.objects for block_id in item.block_ids]
        assert covered == list(range(1000, 1000 + result.block_count)), "a promise was not kept"
        stamps = b"".join(item.stamps for item in job.objects)
        assert hashes_of(stamps) == hashes[computed : computed + result.block_count]
        self.world.hand_over(job)
        self.follow()

    def expect(self, hashes: Sequence[bytes], computed: int) -> tuple[int, int]:
        """Blocks that are readable without a gap, before anything that is being loaded and all."""
        tiers = self.manager.storage.tiers
        readable: set[bytes] = set()
        busy: set[bytes] = set()
        for (name, key), fact in self.contents.items():
            tier = tiers[TIERS.index(name)]
            if tier.is_readable:
                blocks = hashes_of(fact.block_hashes)
                readable.update(blocks)
                record = tier.index.get(key)  # type: ignore[arg-type]
                if record is not None and record.loads:
                    busy.update(blocks)
        total = count(hashes[computed:], readable)
        return min(total, count(hashes[computed:], readable - busy)), total

    def is_coming(self) -> bool:
        """Whether some write is in motion, or some tier does not know yet what it has."""
        tiers = self.manager.storage.tiers
        is_writing = any(
            not record.is_readable for tier in tiers for record in tier.index.records.values()
        )
        return is_writing or self.manager.storage.is_opening

    @rule(blocks=BLOCKS, include_tail=st.booleans(), is_early=st.booleans())
    def store(self, blocks: list[int], include_tail: bool, is_early: bool) -> None:
        request = self.new_request(blocks)
        full_blocks = len(request.chain.hashes)
        job = self.manager.plan_store(
            request,
            full_blocks=full_blocks,
            tables=one_table(range(full_blocks)),
            include_tail=include_tail,
            tokens=tokens_of(blocks),
        )
        if job is not None:
            self.world.hand_over(job)
        self.follow(is_eviction=True)
        if is_early:
            self.live.remove(request)
            self.manager.end_request(request)
            self.follow()

    # ---- between requests ----

    @rule()
    def upkeep(self) -> None:
        if not self.manager.wants_upkeep:
            return
        self.world.hand_over(self.manager.plan_upkeep())
        self.follow(is_eviction=True)

    @rule(when=RARELY)
    def reset(self, when: bool) -> None:
        if when:
            self.manager.reset()
            self.follow()
            assert self.contents == {}

    @rule(
        place=st.sampled_from([1, 2]),
        rank=st.integers(0, 1),
        health=st.sampled_from(
            [TierHealth.OK, TierHealth.OK, TierHealth.OK, TierHealth.NO_SPACE, TierHealth.SUSPENDED]
        ),
    )
    def report_health(self, place: int, rank: int, health: TierHealth) -> None:
        if rank < len(self.world.ranks):
            self.health[rank][place] = health
            self.manager.report_health(rank, self.health[rank])
            self.follow()

    @rule(data=st.data(), place=st.sampled_from([1, 2]), rank=st.integers(0, 1))
    def lose_file(self, data: st.DataObject, place: int, rank: int) -> None:
        """Somebody removes or damages a file behind our back."""
        if rank >= len(self.world.ranks) or not self.world.ranks[rank].files[place]:
            return
        files = self.world.ranks[rank].files[place]
        name = data.draw(st.sampled_from(list(files)))
        if data.draw(st.booleans()):
            del files[name]
            self.world.ranks[rank].lost[place].add(name)
        else:
            files[name] = False

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)
        self.follow()

    # ---- execute and commit ----

    @rule(data=st.data(), fault=FAULTS, faulty=st.integers(0, 2), count=st.integers(1, 4))
    def execute(
        self, data: st.DataObject, fault: FailureKind | None, faulty: int, count: int
    ) -> None:
        for _ in range(min(count, len(self.world.tickets))):
            ticket = self.world.tickets.pop(data.draw(st.integers(0, len(self.world.tickets) - 1)))
            self.world.run(ticket, fault, faulty)

    @rule(count=st.integers(1, 4))
    def end_late_copies(self, count: int) -> None:
        self.world.end_late_copies(count)

    @rule(data=st.data(), count=st.integers(1, 4))
    def commit(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.world.results))):
            result = self.world.results.pop(data.draw(st.integers(0, len(self.world.results) - 1)))
            self.manager.commit(result)
            self.follow()

    @rule(fault=FAULTS)
    def settle_down(self, fault: FailureKind | None) -> None:
        """As it mostly goes: what is due is done and reported before anything else happens."""
        self.upkeep()
        self.world.work(fault)
        while self.world.results:
            self.manager.commit(self.world.results.pop(0))
            self.follow()

    @rule(prompts=st.lists(BLOCKS, min_size=1, max_size=4), fault=FAULTS)
    def serve(self, prompts: list[list[int]], fault: FailureKind | None) -> None:
        """Whole requests one after the other: what is there is loaded, the rest is stored."""
        for blocks in prompts:
            self.look_and_load(blocks, 0, False)
            self.settle_down(fault)
            self.store(blocks, True, True)
            self.settle_down(None)

    @rule(prompts=st.lists(BLOCKS, min_size=2, max_size=4))
    def serve_at_once(self, prompts: list[list[int]]) -> None:
        """Requests that overlap; their jobs are done in the end."""
        for blocks in prompts:
            self.look_and_load(blocks, 0, False)
            self.store(blocks, True, False)
            self.upkeep()

    # ---- after every step ----

    def follow(self, *, is_eviction: bool = False) -> None:
        """Replay what was logged. Where only evictions delete, tails leave before heads."""
        events: list[KVCEvent] = self.manager.take_events()
        for event in events:
            replay(self.contents, [event])
            if is_eviction:
                assert isinstance(event, Delete), "something was announced before it was there"
                children = [
                    fact
                    for (tier, _), fact in self.contents.items()
                    if tier == event.tier and fact.parent_hash == event.fact.chunk_hash
                ]
                assert not children, "a head left before its tail"
            assert isinstance(event, Insert | Delete | Move | Copy)

    @invariant()
    def books_are_right(self) -> None:
        """Auditors agree; every file is charged; nothing is over its limit (I1)."""
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        for place, tier in enumerate(self.manager.storage.tiers):
            assert tier.used_bytes <= tier.capacity_bytes
            if not place or tier.health is TierHealth.OPENING or self.pages:
                continue
            left = self.file_tier_bytes()[place - 1] - max(self.foreign)
            assert tier.capacity_bytes == left, "not what others leave to every rank"
            known = {
                (record.group, record.run)
                for record in (
                    *tier.index.records.values(),
                    *tier.leaving.records(),
                )
            }
            for rank in self.world.ranks:
                there = {(name.group, name.run) for name in rank.files[place]}
                assert there <= known, "a file is on the medium and in no book"

    @invariant()
    def events_are_the_contents(self) -> None:
        """Replaying all events gives exactly what the tiers hold (I2)."""
        if hasattr(self, "manager"):
            assert set(self.contents) == set(self.manager.storage.placements())

    @invariant()
    def what_the_books_say_is_there(self) -> None:
        """Readable and promised rows are what was written there, and files are there (I3)."""
        if not hasattr(self, "manager"):
            return
        for place in (1, 2):
            for record in self.manager.storage.tiers[place].index.records.values():
                name = ObjectName(record.group, record.parent_hash, record.run)
                for rank in self.world.ranks if record.is_readable else ():
                    is_there = name in rank.files[place] or name in rank.lost[place]
                    assert is_there, "the books have what nobody wrote, or what was deleted"
        for record in self.manager.storage.tiers[0].index.records.values():
            if record.is_readable:
                self.expect_rows(record.rows, record.run)
        for request in self.live:
            for segment in request.lease.segments if request.lease is not None else ():
                if segment.tier == 0:
                    self.expect_rows(segment.record.rows, segment.record.run)

    def expect_rows(self, rows: Iterable[int], run: bytes) -> None:
        for rank in self.world.ranks:
            assert [rank.rows.get(row) for row in rows] == hashes_of(run)

    def teardown(self) -> None:
        """Everything comes to rest: no lease, no job, and only what can be had is charged (I8)."""
        if not hasattr(self, "manager"):
            return
        self.open_tiers(len(self.pages))
        self.come_to_rest(is_final=False)
        for health in (TierHealth.SUSPENDED, TierHealth.OK):  # what failed is tried again then
            for rank in range(len(self.world.ranks)):
                self.health[rank] = [TierHealth.OK, health, health]
                self.manager.report_health(rank, self.health[rank])
        for request in self.live:
            self.manager.end_request(request)
        self.come_to_rest()
        for place, tier in enumerate(self.manager.storage.tiers):
            readable = [record for record in tier.index.records.values() if record.is_readable]
            assert tier.used_bytes == sum(record.size_bytes for record in readable)
            assert not place or tier.levels.excess_bytes == 0, "more than the threshold stays"
        self.manager.reset()
        self.follow()
        self.come_to_rest()
        assert self.contents == {}
        assert all(tier.used_bytes == 0 for tier in self.manager.storage.tiers)
        assert all(not files for rank in self.world.ranks for files in rank.files.values())

    def come_to_rest(self, *, is_final: bool = True) -> None:
        for _ in range(ROUNDS):
            self.upkeep()
            self.follow()
            if self.world.is_idle and not self.manager.wants_upkeep:
                break
            self.world.work()
            while self.world.results:
                self.manager.commit(self.world.results.pop())
            self.follow()
        self.manager.check()
        if is_final:  # before, requests live
            assert (self.manager.lease_count, self.manager.open_job_count) == (0, 0)
        self.events_are_the_contents()


def count(hashes: Sequence[bytes], held: set[bytes]) -> int:
    """How many of them from the first on are held."""
    for position, block_hash in enumerate(hashes):
        if block_hash not in held:
            return position
    return len(hashes)


assert WAIT_SECONDS < 2.0  # `pass_time` goes beyond it
