"""Random work over three tiers with real books, threads and files, faults, kills and restarts.

Operations follow from the seed, as far as threads allow. An era has one set of directories; its
processes follow one another there, some of them killed in the middle of a system call.
"""

import os
import random
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from fakes import tokens_of
from medium import Medium, works
from soak.faults import Faults, files_below
from soak.host import REUSED, Host, HostSettings, Load

from opal_connector.eviction import POLICIES
from opal_connector.managers import LookupState, OpalRequest
from opal_connector.tiers import file_bytes

OPERATIONS_OF_A_PROCESS = 700
PROCESSES_OF_AN_ERA = 4
CHECK_EVERY = 50
BUSY_JOBS = 48  # so many jobs in motion, and the next operation waits a moment
STEP_LIMIT_MS, SHUTDOWN_LIMIT_SECONDS = 5.0, 5.0
HANGING_SHUTDOWNS = 2
KEPT_LOADS = 12  # ended loads whose blocks must stay right for a while
KINDS = {
    "store": 36.0,
    "load": 34.0,
    "look_and_abort": 6.0,
    "load_and_abort": 4.0,
    "preempt": 4.0,
    "step": 8.0,
    "evict": 2.0,
    "damage": 3.0,
    "fault": 0.6,
    "reset": 0.25,
    "remove_directory": 0.1,
}


class Report(msgspec.Struct):
    """What a run found. `ok` is that all of it is as it must be.

    `shared_excess_bytes` is by how much a shared directory was larger than its limit at most.
    """

    seed: int = 0
    ops: int = 0
    by_kind: dict[str, int] = {}
    faults: dict[str, int] = {}
    failures: dict[str, int] = {}
    loads_right: int = 0
    processes: int = 0
    killed: int = 0
    wrong_bytes: int = 0
    late_writes: int = 0
    exceptions: int = 0
    auditors_clean: bool = True
    events_equal_contents: bool = True
    leases: int = 0
    jobs: int = 0
    over_capacity: int = 0
    over_capacity_on_disk: int = 0
    shared_excess_bytes: int = 0
    temporary_files: int = 0
    step_p99_ms: float = 0.0
    step_max_ms: float = 0.0
    shutdown_s: float = 0.0
    seconds: float = 0.0
    problems: list[str] = []
    ok: bool = False

    def note(self, problem: str) -> None:
        """Say what was wrong, the first few times."""
        if len(self.problems) < 20:
            self.problems.append(problem)


class Soak:
    """One run.

    Mutable state: the report, the host of the process that runs now, its live requests, and the
    loads whose blocks are still looked at.
    """

    def __init__(self, *, operations: int, seed: int, say: Callable[[str], None]) -> None:
        self.report = Report(seed=seed)
        self._left = operations
        self._say = say
        self._chance = random.Random(seed)
        self._by_kind: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._steps: list[float] = []
        self._hanging_shutdowns = 0
        self._operation = 0
        self._live: list[OpalRequest] = []
        self._ended: deque[Load] = deque()
        self._prompts: list[list[int]] = []

    def run(self) -> Report:
        """All eras."""
        began = time.monotonic()
        report = self.report
        while self._left > 0:
            with tempfile.TemporaryDirectory(prefix="opal-soak-") as directory:
                root = Path(directory).resolve()
                with Medium(root).installed() as medium:
                    self._era(root, medium)
        report.ops = self._operation
        report.by_kind = dict(sorted(self._by_kind.items()))
        report.faults = dict(sorted(self._faults.items()))
        report.failures = dict(sorted(self._failures.items()))
        steps = np.array(self._steps or [0.0])
        report.step_p99_ms = round(1e3 * float(np.quantile(steps, 0.99)), 3)
        report.step_max_ms = round(1e3 * float(steps.max()), 3)
        report.shutdown_s = round(report.shutdown_s, 3)
        report.seconds = round(time.monotonic() - began, 1)
        report.ok = self._is_ok()
        return report

    def _is_ok(self) -> bool:
        report = self.report
        counts = (
            report.wrong_bytes,
            report.late_writes,
            report.exceptions,
            report.leases,
            report.jobs,
            report.over_capacity,
            report.over_capacity_on_disk,
            max(0, report.shared_excess_bytes),
            report.temporary_files,
        )
        return (
            not any(counts)
            and report.auditors_clean
            and report.events_equal_contents
            and report.step_p99_ms <= STEP_LIMIT_MS
            and report.shutdown_s <= SHUTDOWN_LIMIT_SECONDS
        )

    # ---- eras and processes ----

    def _era(self, root: Path, medium: Medium) -> None:
        chance = self._chance
        chunk_blocks = chance.choice([1, 2, 4])
        row_bytes = chance.choice([512, 512, 4096])
        object_bytes = file_bytes(chunk_blocks, row_bytes)
        common = {
            "chunk_blocks": chunk_blocks,
            "row_bytes": row_bytes,
            "ranks": chance.choice([1, 1, 2]),
            "near_bytes": chance.randrange(8, 24) * object_bytes + (64 << 10),
            "timeout_seconds": chance.choice([0.1, 0.2, 0.3]),
        }
        # One directory holds all ranks of a shared tier, and its limit is for their sum.
        common["far_bytes"] = common["ranks"] * chance.randrange(16, 40) * object_bytes
        self._prompts = make_prompts(chance)
        for number in range(PROCESSES_OF_AN_ERA):
            if self._left <= 0:
                return
            modes = ["through", "demote", "off"]
            settings = HostSettings(
                **common,  # type: ignore[arg-type]
                memory_blocks=chance.randrange(2, 7) * chunk_blocks,
                writes=(chance.choice(modes), chance.choice(modes)),
                policies=tuple(chance.choice(sorted(POLICIES)) for _ in range(3)),  # type: ignore[arg-type]
            )
            if number and chance.random() < 0.5:
                self._be_killed(settings, root, medium)
            self._process(settings, root, medium)

    def _be_killed(self, settings: HostSettings, root: Path, medium: Medium) -> None:
        """Another process works in the directories and dies at one of its system calls."""
        seed, calls = self._chance.random(), self._chance.randrange(30, 3000)
        child = os.fork()
        if child == 0:
            try:
                work_and_die(settings, root, medium, seed=seed, calls=calls, prompts=self._prompts)
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.report.killed += status == -signal.SIGKILL
        if status not in (0, -signal.SIGKILL):
            self.report.note(f"a process that was to be killed ended with {status}")
            self.report.exceptions += 1
        age(root)

    def _process(self, settings: HostSettings, root: Path, medium: Medium) -> None:
        report = self.report
        report.processes += 1
        faults = Faults(random.Random(self._chance.random()), medium, root)
        host = Host(settings, root)
        host.load_ended = self._ended.append
        self._live = []
        self._ended.clear()
        count = min(self._left, OPERATIONS_OF_A_PROCESS)
        for _ in range(count):
            self._operation += 1
            kind = self._chance.choices([*KINDS], [*KINDS.values()])[0]
            self._by_kind[kind] += 1
            faults.tick(self._operation)
            self._guarded(lambda kind=kind: self._do(kind, host, faults))
            self._guarded(lambda: host.step(time.monotonic()))
            self._steps.append(host.end_step())
            self._look_at_ended(host, KEPT_LOADS)
            while host.manager.open_job_count > BUSY_JOBS and not faults.hang:
                threading.Event().wait(0.001)
                self._guarded(lambda: host.step(time.monotonic()))
                self._steps.append(host.end_step())
            self._check_limits(host)
            if self._operation % CHECK_EVERY == 0:
                self._check(host, root)
            if self._operation % 2000 == 0:
                self._say(f"{self._operation} operations, {report.wrong_bytes} wrong bytes")
        self._left -= count
        self._end(host, faults, root)

    def _guarded(self, call: Callable[[], object]) -> None:
        """Nothing may come out of the books or the movers."""
        try:
            call()
        except Exception:  # noqa: BLE001 - that is what is counted
            self.report.exceptions += 1
            self.report.note(traceback.format_exc(limit=-6))

    # ---- operations ----

    def _do(self, kind: str, host: Host, faults: Faults) -> None:
        match kind:
            case "store":
                self._store(host, self._request(host))
            case "load" | "load_and_abort":
                self._load(host, self._request(host), is_aborted=kind == "load_and_abort")
            case "look_and_abort":
                request, _ = self._request(host)
                self._look(host, request)
                host.timed(lambda: host.manager.end_request(request))
            case "preempt":
                request, tokens = self._request(host)
                host.store(request, tokens, max_blocks=self._chance.randrange(1, 9))
                host.manager.release(request)
                request.store_again()
                self._load(host, (request, tokens), is_aborted=False)
            case "evict":
                self._evict(host)
            case "damage":
                faults.damage()
            case "fault":
                faults.begin(self._operation)
            case "reset":
                host.manager.reset()
            case "remove_directory":
                faults.remove_directory()
        self._faults.update(faults.counts)
        faults.counts.clear()

    def _request(self, host: Host) -> tuple[OpalRequest, list[int]]:
        blocks = self._chance.choice(self._prompts)
        blocks = blocks[: self._chance.randrange(1, len(blocks) + 1)]
        tokens = tokens_of(blocks)
        request = host.manager.new_request(f"r{self._operation}")
        request.extend(tokens)
        return request, tokens

    def _look(self, host: Host, request: OpalRequest) -> int:
        result = host.timed(
            lambda: host.manager.lookup(
                request,
                computed_blocks=0,
                max_blocks=len(request.chain.hashes),
                now=time.monotonic(),
            )
        )
        return result.block_count if result.state is LookupState.HIT else 0

    def _store(self, host: Host, made: tuple[OpalRequest, list[int]]) -> None:
        request, tokens = made
        host.store(request, tokens)
        host.timed(lambda: host.manager.end_request(request))

    def _load(self, host: Host, made: tuple[OpalRequest, list[int]], *, is_aborted: bool) -> None:
        request, tokens = made
        count = self._look(host, request)
        if count and host.load(request, count) is None:
            host.manager.release(request)
        if not is_aborted:
            host.store(request, tokens)
        host.timed(lambda: host.manager.end_request(request))

    def _evict(self, host: Host) -> None:
        tier = self._chance.choice(host.manager.storage.tiers)
        keys = tier.index.readable_keys()
        if keys:
            tier.remove(self._chance.choice(keys), force=False)

    # ---- what must be so ----

    def _look_at_ended(self, host: Host, keep: int) -> None:
        """Blocks that were loaded stay right until they are given back."""
        while len(self._ended) > keep:
            load = self._ended.popleft()
            self.report.loads_right += len(load.job.objects) - len(load.failed)
            for rank in range(len(host.movers)):
                wrong = host.wrong_blocks(load, rank, load.failed)
                if wrong:
                    self.report.wrong_bytes += wrong
                    self.report.note(f"{wrong} blocks of an ended load changed")
            host.give_back(load.block_ids)

    def _check_limits(self, host: Host) -> None:
        limits = (
            host.settings.memory_blocks * host.settings.row_bytes,
            host.settings.near_bytes,
            host.settings.far_bytes,
        )
        for tier, limit in zip(host.manager.storage.tiers, limits, strict=True):
            if tier.used_bytes > limit and not tier.space.is_shared:
                if not self.report.over_capacity:
                    self.report.note(f"{tier!r} is over {limit}: {host.settings}")
                self.report.over_capacity += 1

    def _check(self, host: Host, root: Path) -> None:
        report = self.report
        try:
            host.manager.check()
        except AssertionError:
            report.auditors_clean = False
            report.note(traceback.format_exc(limit=-4))
        host.follow()
        if set(host.contents) != set(host.manager.storage.placements()):
            report.events_equal_contents = False
            report.note("the replay of all events is not what the tiers hold")
        for rank, paged in enumerate(host.paged):
            if not np.all(paged.blocks[host.free_blocks] == REUSED):
                report.late_writes += 1
                report.note(f"somebody wrote to free blocks of rank {rank}")
        near_bytes = size_on_disk(root / "near")
        if near_bytes > host.settings.near_bytes * host.settings.ranks:
            report.over_capacity_on_disk += 1
            report.note(f"{near_bytes} bytes in near: {host.settings} {host.manager.storage!r}")
        far_excess_bytes = size_on_disk(root / "far") - host.settings.far_bytes
        report.shared_excess_bytes = max(report.shared_excess_bytes, far_excess_bytes)

    def _end(self, host: Host, faults: Faults, root: Path) -> None:
        """Everything comes to rest, or is left hanging: the process ends in time either way."""
        report = self.report
        leaves_hanging = self._hanging_shutdowns < HANGING_SHUTDOWNS and self._chance.random() < 0.3
        faults.clear()
        deadline = time.monotonic() + 20
        while host.manager.open_job_count and time.monotonic() < deadline:
            self._guarded(lambda: host.step(time.monotonic()))
            threading.Event().wait(0.001)
        report.jobs += host.manager.open_job_count
        if host.manager.open_job_count:
            report.note(f"jobs never end: {host.manager!r}")
        report.leases += host.manager.lease_count
        self._look_at_ended(host, 0)
        report.wrong_bytes += host.wrong_bytes
        self._failures.update(host.failures)
        self._check(host, root)
        if leaves_hanging:
            self._hanging_shutdowns += 1
            faults.begin_hang(self._chance.choice(["near", "far"]), "pwritev")
            for _ in range(30):
                self._guarded(lambda: self._store(host, self._request(host)))
                self._guarded(lambda: host.step(time.monotonic()))
        report.shutdown_s = max(report.shutdown_s, host.close())
        faults.clear()
        wait_for_threads()
        own = f".tmp-{os.getpid()}-"
        left = files_below(root, lambda name: name.startswith(own))
        report.temporary_files += len(left)
        if left:
            report.note(f"left behind: {left[:3]}")
        remove_trash(root)


def make_prompts(chance: random.Random) -> list[list[int]]:
    """Prompts that share beginnings, some asked for more often than others."""
    documents = [[chance.randrange(1000) for _ in range(chance.randrange(2, 9))] for _ in range(24)]
    prompts: list[list[int]] = []
    for number, document in enumerate(documents):
        for _ in range(1 + 12 // (number + 1)):
            cut = chance.randrange(1, len(document) + 1)
            tail = [chance.randrange(1000) for _ in range(chance.randrange(4))]
            prompts.append([*document[:cut], *tail])
    return prompts


def work_and_die(
    settings: HostSettings,
    root: Path,
    medium: Medium,
    *,
    seed: float,
    calls: int,
    prompts: Sequence[list[int]],
) -> None:
    """For a forked process: store and load until the system call of that number kills it."""
    chance = random.Random(seed)
    lock = threading.Lock()
    left = calls

    def count(call: str, path: str) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    medium.rule = count
    host = Host(settings, root)
    for number in range(2000):
        tokens = tokens_of(chance.choice(prompts))
        request = host.manager.new_request(f"k{number}")
        request.extend(tokens)
        host.store(request, tokens)
        host.manager.end_request(request)
        host.step(time.monotonic())
        if number % 4 == 0:
            threading.Event().wait(0.001)
    medium.rule = works
    os._exit(0)


def remove_trash(root: Path) -> None:
    """Remove what was being emptied when a process ended, as the next one does when it opens.

    It tells by the process id that nobody is at it; here all of them have the same.
    """
    for folder, folders, _ in os.walk(root):
        for name in folders:
            if name.startswith(f".tmp-{os.getpid()}-"):
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)


def age(root: Path) -> None:
    """Let hours pass for what a dead process left: in a shared directory only age tells."""
    for folder, folders, names in os.walk(root):
        for name in (*folders, *names):
            if name.startswith(".tmp-"):
                os.utime(f"{folder}/{name}", (0, 0), follow_symlinks=False)


def size_on_disk(directory: Path) -> int:
    """Bytes of objects, finished and unfinished, by their files."""
    size = 0
    for path in files_below(directory, lambda name: name.endswith(".opal") or is_temporary(name)):
        try:
            size += path.stat().st_size
        except FileNotFoundError:
            continue
    return size


def is_temporary(name: str) -> bool:
    """Whether a file is one that is being written, by this process or another."""
    return name.startswith(".tmp-")


def wait_for_threads(timeout_seconds: float = 20.0) -> None:
    """Until no thread of a tier is left that could still touch its directory."""
    deadline = time.monotonic() + timeout_seconds
    for thread in threading.enumerate():
        if thread.name.startswith("opal-"):
            thread.join(max(0.0, deadline - time.monotonic()))
