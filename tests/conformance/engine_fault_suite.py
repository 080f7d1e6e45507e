"""What an instance does when the engine it shares with others stops, hangs, fills up or forgets.

Real books, threads and clients, as an instance of vLLM has them, over a real engine that the test
stops and starts. An engine's fault is a miss within the tier's deadline, the circuit opens and
closes, and nothing that the scheduler calls ever waits.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
from engine_suite import EngineSuite, EngineWorld
from fakes import tokens_of
from soak.driver import held, load, store
from soak.host import NAMESPACE, Host, HostSettings

from opal_connector.config import EngineTierConfig
from opal_connector.managers import LookupState
from opal_connector.tiers.engines.names import parse_value_key, rank_prefix
from opal_connector.transfers import TierHealth

TIMEOUT_SECONDS = 1.0
# A call of the scheduler that took longer has waited for something; the machine may be busy.
WAITED_SECONDS = 0.5
RECOVERY_SECONDS = 40.0
Result = TypeVar("Result")
PROMPTS = [[number, number + 1000] for number in range(6)]


class FaultyWorld(EngineWorld, Protocol):
    """An engine in a process of its own."""

    tier: str

    def settings(self) -> EngineTierConfig:
        """What a user would write."""

    def stop(self) -> None:
        """End it at once; what it persists stays."""

    def start(self) -> None:
        """Start it again, with what it persists."""

    def pause(self) -> None:
        """SIGSTOP."""

    def resume(self) -> None:
        """SIGCONT."""

    def restart_empty(self) -> None:
        """End it, and start it with nothing."""

    def raw_keys(self) -> list[str]:
        """All keys of objects."""


class EngineFaultSuite(EngineSuite):
    """Inherit this one for a real engine: it has the other suite's tests too."""

    is_persistent = True  # whether values survive a stop and a start

    @pytest.fixture
    def faulty(self, world: FaultyWorld) -> Iterator[FaultyWorld]:
        """The engine, empty; well again afterwards, whatever the test did."""
        world.restart_empty()
        yield world
        world.resume()
        world.start()

    @pytest.fixture
    def host(self, faulty: FaultyWorld, tmp_path: Path) -> Iterator[Host]:
        host = make_host(faulty, tmp_path)
        yield host
        host.close()

    def test_stored_on_one_instance_is_found_by_another(
        self, faulty: FaultyWorld, host: Host, tmp_path: Path
    ) -> None:
        """By asking, without waiting for a listing; and its bytes are right."""
        store(host, *PROMPTS)
        other = make_host(faulty, tmp_path)
        for prompt in PROMPTS:
            asked(other, prompt)
            assert load(other, prompt) == set()
        finish(other)
        other.close()

    @pytest.mark.parametrize("answer_blocks", [1, 2])
    def test_a_prompt_is_found_without_its_answer(
        self, faulty: FaultyWorld, tmp_path: Path, answer_blocks: int
    ) -> None:
        """The end of a prompt inside a chunk stays, also where the answer has filled the chunk.

        And a third instance that has only heard of all of it takes nothing away.
        """
        writer, reader, third = (make_host(faulty, tmp_path, chunk_blocks=4) for _ in range(3))
        prompt = [0, 1]
        store(writer, prompt, [0, 1, *range(50, 50 + answer_blocks)])
        asked(third, [0, 1, *range(50, 50 + answer_blocks)])
        asked(third, prompt)
        third.run_until(lambda: third.is_at_rest, timeout_seconds=RECOVERY_SECONDS)
        asked(reader, prompt)
        assert load(reader, prompt) == set()
        for host in (writer, reader, third):
            finish(host)
            host.close()

    def test_stopped_engine_is_a_miss_and_comes_back(self, faulty: FaultyWorld, host: Host) -> None:
        """Loads fail within the deadline, the circuit opens, and closes when it is there again."""
        store(host, *PROMPTS)
        faulty.stop()
        suffer(host)
        faulty.start()
        recover(host)
        finish(host)

    def test_paused_engine_is_a_miss_and_comes_back(self, faulty: FaultyWorld, host: Host) -> None:
        """One that takes connections and answers nothing is the worst of all."""
        store(host, *PROMPTS)
        faulty.pause()
        suffer(host)
        faulty.resume()
        recover(host)
        finish(host)

    def test_slow_engine_holds_up_nobody(self, faulty: FaultyWorld, host: Host) -> None:
        """It runs for a moment, then stands still for long, again and again."""
        store(host, *PROMPTS)
        with slowed(faulty):
            deadline = time.monotonic() + 4 * TIMEOUT_SECONDS
            number = 0
            while time.monotonic() < deadline:
                number += 1
                work(host, PROMPTS[number % len(PROMPTS)], [7000 + number])
        recover(host)
        finish(host)

    def test_full_engine_takes_no_stores_and_serves_loads(
        self, faulty: FaultyWorld, host: Host
    ) -> None:
        """Stores are shed until a probe finds room; what is there is loaded as before."""
        if not hasattr(faulty, "fill"):
            pytest.skip("this engine has no limit that a test could reach")
        store(host, *PROMPTS)
        drop_memory(host)
        faulty.fill()
        number = 50_000
        while health(host) is not TierHealth.NO_SPACE:
            number += 1
            assert number < 50_100, "a full engine is never noticed"
            work(host, [number])
            host.run_until(lambda: not host.stores, timeout_seconds=RECOVERY_SECONDS)
            host.run_until(lambda: host.manager.open_job_count == 0, timeout_seconds=60)
        drop_memory(host)
        assert load(host, PROMPTS[0]) == set()
        faulty.drain()
        recover(host)
        finish(host)

    def test_engine_that_forgot_everything(self, faulty: FaultyWorld, host: Host) -> None:
        """Restarted empty: what the books believed becomes misses and DELETEs, not errors."""
        store(host, *PROMPTS)
        drop_memory(host)
        assert held(host, PROMPTS[0]) == len(PROMPTS[0])
        faulty.restart_empty()
        recover(host)
        for prompt in PROMPTS:
            work(host, prompt)
        host.run_until(lambda: host.is_at_rest, timeout_seconds=RECOVERY_SECONDS)
        finish(host)
        assert engine_contents(host) <= readable(faulty, host)

    def test_engine_restarted_with_its_data(self, faulty: FaultyWorld, host: Host) -> None:
        """What it kept is served again."""
        if not self.is_persistent:
            pytest.skip("this engine keeps nothing")
        store(host, *PROMPTS)
        drop_memory(host)
        faulty.stop()
        faulty.start()
        recover(host)
        assert load(host, PROMPTS[0]) == set()
        finish(host)

    def test_random_work_while_the_engine_comes_and_goes(
        self, faulty: FaultyWorld, host: Host
    ) -> None:
        """Stores, loads and aborts at every moment of a fault: no wrong byte, no exception."""
        actions: list[Callable[[], None]] = [
            faulty.pause, faulty.resume, faulty.stop, faulty.start, faulty.pause, faulty.stop,
            faulty.start, faulty.restart_empty,
        ]  # fmt: skip
        for number, action in enumerate(actions):
            thread = threading.Thread(target=action)
            thread.start()
            for step in range(12):
                prompt = [*PROMPTS[step % len(PROMPTS)], 100 * number + step % 3]
                work(host, prompt, is_aborted=step % 5 == 0)
            thread.join(RECOVERY_SECONDS)
        recover(host)
        finish(host)


def make_host(world: FaultyWorld, root: Path, *, chunk_blocks: int = 1) -> Host:
    """An instance whose memory is small, so that loads come from the engine."""
    settings = HostSettings(
        tiers=("CPUMemory", world.tier),
        store=world.settings(),
        memory_blocks=4 * chunk_blocks,
        chunk_blocks=chunk_blocks,
        timeout_seconds=TIMEOUT_SECONDS,
        threads=2,
    )
    host = Host(settings, root)
    host.load_ended = lambda load: host.give_back(load.block_ids)  # as a request that has ended
    host.run_until(lambda: health(host) is TierHealth.OK, timeout_seconds=RECOVERY_SECONDS)
    return host


def asked(host: Host, prompt: list[int]) -> None:
    """Look a prompt up until the engine has answered, as vLLM asks again."""
    tokens = tokens_of(prompt)
    request = host.manager.new_request("asks")
    request.extend(tokens)
    deadline = time.monotonic() + 10
    while True:
        result = quick(
            lambda: host.manager.lookup(
                request, computed_blocks=0, max_blocks=len(prompt), now=time.monotonic()
            )
        )
        host.step(time.monotonic())
        if result.state is not LookupState.WAIT or time.monotonic() > deadline:
            break
        threading.Event().wait(0.002)
    host.manager.end_request(request)


def work(host: Host, *prompts: list[int], is_aborted: bool = False) -> None:
    """What vLLM does with requests: look, load what is promised, compute and store the rest."""
    for prompt in prompts:
        tokens = tokens_of(prompt)
        request = host.manager.new_request(f"r{prompt}")
        request.extend(tokens)
        result = quick(
            lambda request=request, prompt=prompt: host.manager.lookup(
                request, computed_blocks=0, max_blocks=len(prompt), now=time.monotonic()
            )
        )
        is_hit = result.state is LookupState.HIT and result.block_count > 0
        if is_hit and host.load(request, result.block_count) is None:
            host.manager.release(request)
        if not is_aborted:
            quick(lambda request=request, tokens=tokens: host.store(request, tokens))
        quick(lambda request=request: host.manager.end_request(request))
        quick(lambda: host.step(time.monotonic()))
        threading.Event().wait(0.005)


def quick(call: Callable[[], Result]) -> Result:
    """Call what the scheduler calls; it must not have waited for an engine."""
    began = time.monotonic()
    result = call()
    took_seconds = time.monotonic() - began
    assert took_seconds < WAITED_SECONDS, f"a call of the scheduler took {took_seconds:.2f} s"
    return result


def drop_memory(host: Host) -> None:
    """Only the engine holds what was stored."""
    memory = host.manager.storage.tiers[0]
    for key in memory.index.readable_keys():
        memory.remove(key, force=False)
    host.follow()


def suffer(host: Host) -> None:
    """Work on until the circuit opens; no load takes longer than its deadline and a little."""
    drop_memory(host)
    began = time.monotonic()
    longest_seconds = 0.0
    while health(host) is not TierHealth.SUSPENDED:
        started = time.monotonic()
        work(host, *PROMPTS)
        host.run_until(lambda: not host.loads, timeout_seconds=RECOVERY_SECONDS)
        longest_seconds = max(longest_seconds, time.monotonic() - started)
        assert time.monotonic() - began < RECOVERY_SECONDS, "the circuit never opened"
    assert longest_seconds < 3 * TIMEOUT_SECONDS + 1.0
    # Suspended: nobody is promised anything there, and nothing is even tried.
    drop_memory(host)
    assert held(host, [9001]) == 0


def recover(host: Host) -> None:
    """Until the circuit is closed; then new work goes through the engine again.

    What is stored while old work still fails may be shed, so more than one prompt is tried.
    """
    deadline = time.monotonic() + RECOVERY_SECONDS
    for number in itertools.count(30000, 2):
        host.run_until(
            lambda: health(host) is TierHealth.OK and host.manager.open_job_count == 0,
            timeout_seconds=RECOVERY_SECONDS,
            now=time.monotonic(),
        )
        prompt = [number, number + 1]
        store(host, prompt)
        drop_memory(host)
        asked(host, prompt)
        if held(host, prompt) == len(prompt) and load(host, prompt) == set():
            return
        assert time.monotonic() < deadline, "the engine is well and nothing goes through it"


def health(host: Host) -> TierHealth:
    return host.manager.storage.tiers[1].health


def finish(host: Host) -> None:
    """Everything ends, the books are right, and the events tell what they hold."""
    host.run_until(
        lambda: host.manager.open_job_count == 0 and host.is_at_rest,
        timeout_seconds=RECOVERY_SECONDS,
        now=time.monotonic(),
    )
    host.manager.check()
    host.follow()
    assert set(host.contents) == set(host.manager.storage.placements())
    assert host.manager.lease_count == 0
    assert host.wrong_bytes == 0


def engine_contents(host: Host) -> set[bytes]:
    """Keys that the books believe the engine to hold."""
    return set(host.manager.storage.tiers[1].index.readable_keys())


def readable(world: FaultyWorld, host: Host) -> set[bytes]:
    """Keys of the objects that the engine holds."""
    prefix = rank_prefix(NAMESPACE, 0)
    keys = (parse_value_key(prefix, key) for key in world.raw_keys() if key.startswith(prefix))
    return {key for key in keys if key is not None}


class slowed:  # noqa: N801 - used as a function
    """While it lasts, the engine stands still nine tenths of the time."""

    def __init__(self, world: FaultyWorld) -> None:
        self._world = world
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._world.resume()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._world.pause()
            self._stop.wait(0.18)
            self._world.resume()
            self._stop.wait(0.02)
