"""Two instances at one engine: what a reset takes does not come back, and both may do the same.

Real books, threads and clients over real engines, as in `engine_fault_suite`.
"""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fault_suite import (
    RECOVERY_SECONDS,
    FaultyWorld,
    asked,
    drop_memory,
    engine_contents,
    finish,
    health,
    make_host,
    readable,
    work,
)
from integration.engines.object_store_server import ObjectStoreServer
from integration.engines.test_object_store_conformance import ObjectStoreWorld
from integration.engines.test_valkey_conformance import ValkeyWorld
from soak.driver import begin_store, held, load, store
from soak.host import Host
from valkey_server import valkey_server

from opal_connector.transfers import TierHealth

PROMPTS = [[number, number + 1000] for number in range(6)]
OTHERS = [[number, number + 1000] for number in range(50, 53)]
WATCHED_SECONDS = 1.2  # two refreshes, and longer than a server takes for what lies in its buffers
ROUNDS = 60


@pytest.fixture(scope="module", params=["Valkey", "ObjectStore"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultyWorld]:
    if request.param == "Valkey":
        with valkey_server(tmp_path_factory.mktemp("valkey"), appendonly=True) as server:
            yield ValkeyWorld(server)
        return
    s3 = ObjectStoreServer()
    s3.start()
    try:
        s3.make_bucket()
        yield ObjectStoreWorld(s3)
    finally:
        s3.stop()


@pytest.fixture
def world(engine: FaultyWorld) -> Iterator[FaultyWorld]:
    """The engine, empty; well again afterwards."""
    for key in engine.raw_keys():
        engine.raw_delete(key)
    yield engine
    engine.resume()


@pytest.fixture
def hosts(world: FaultyWorld, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two instances of one model, which share nothing but the engine."""
    first, second = make_host(world, tmp_path / "first"), make_host(world, tmp_path / "second")
    yield first, second
    for host in (first, second):
        host.close()


def test_a_reset_while_stores_are_in_flight(world: FaultyWorld, hosts: tuple[Host, Host]) -> None:
    """At whatever moment it comes: the engine is empty when the wipe has ended, and stays so."""
    first, second = hosts
    for steps in (0, 1, 2, 4):
        store(first, *PROMPTS[:2])
        for prompt in PROMPTS[2:]:
            begin_store(first, prompt)
        for _ in range(steps):
            first.step(time.monotonic())
        first.manager.reset()
        wipe_ends(first)
        expect_nothing(world, first, second, watched_seconds=0.3)
    expect_nothing(world, first, second)
    store(first, *OTHERS)
    assert readable(world, first) == engine_contents(first) != set()
    finish(first)
    finish(second)


def test_a_reset_while_the_engine_stands_still(
    world: FaultyWorld, hosts: tuple[Host, Host]
) -> None:
    """What a paused engine carries out when it goes on is gone when the wipe has ended."""
    first, second = hosts
    store(first, *PROMPTS[:2])
    world.pause()
    for prompt in PROMPTS[2:]:
        begin_store(first, prompt)
    first.run_until(
        lambda: not first.stores and health(first) is TierHealth.SUSPENDED,
        timeout_seconds=RECOVERY_SECONDS,
        now=time.monotonic(),
    )
    first.manager.reset()
    first.step(time.monotonic())
    world.resume()
    wipe_ends(first)
    expect_nothing(world, first, second)
    finish(first)
    finish(second)


def test_a_reset_between_a_pause_and_its_end(world: FaultyWorld, hosts: tuple[Host, Host]) -> None:
    """The stores hang when the reset comes, and are given up after it."""
    first, second = hosts
    store(first, *PROMPTS[:2])
    world.pause()
    for prompt in PROMPTS[2:]:
        begin_store(first, prompt)
    first.step(time.monotonic())
    first.manager.reset()
    first.run_until(lambda: not first.stores, timeout_seconds=RECOVERY_SECONDS)
    world.resume()
    wipe_ends(first)
    expect_nothing(world, first, second)
    finish(first)
    finish(second)


def test_one_instance_resets_what_the_other_one_uses(
    world: FaultyWorld, hosts: tuple[Host, Host]
) -> None:
    """The other one's loads are misses, its books follow, and both go on."""
    first, second = hosts
    store(first, *PROMPTS)
    for prompt in PROMPTS:
        asked(second, prompt)
        assert held(second, prompt) == len(prompt)
    first.manager.reset()
    wipe_ends(first)
    for prompt in PROMPTS:
        work(second, [*prompt, 7])
    for host in hosts:
        rest(host)
    follow(world, second)
    finish(first)
    finish(second)


def test_two_instances_write_and_remove_the_same_objects(
    world: FaultyWorld, hosts: tuple[Host, Host]
) -> None:
    """At once, for a while: no wrong byte, the books are what was told, misses are honest."""
    faults: list[BaseException] = []

    def run(number: int) -> None:
        try:
            use_and_remove(hosts[number], random.Random(number))
        except BaseException as fault:
            faults.append(fault)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for host in hosts:
        follow(world, host)
        drop_memory(host)
        for prompt in PROMPTS:
            if held(host, prompt) == len(prompt):
                assert load(host, prompt) == set()
        finish(host)


# ---- helpers ----


def use_and_remove(host: Host, chance: random.Random) -> None:
    """Store and load, and now and then remove something or all of it."""
    for _ in range(ROUNDS):
        work(host, chance.choice(PROMPTS))
        what = chance.random()
        if what < 0.05:
            host.manager.reset()
        elif what < 0.3:
            remove_everywhere(host)
    rest(host)


def remove_everywhere(host: Host) -> None:
    """Forget some of what is in the engine, and have it deleted there, as damage would."""
    tier = host.manager.storage.tiers[1]
    for key in sorted(tier.index.readable_keys())[:3]:
        tier.remove(key, force=False)
    drop_memory(host)


def wipe_ends(host: Host) -> None:
    """Take steps until the engine's tier has nothing to delete any more."""
    leaving = host.manager.storage.tiers[1].leaving
    host.run_until(
        lambda: not leaving.wipe.is_unfinished and host.manager.open_job_count == 0,
        timeout_seconds=RECOVERY_SECONDS,
    )


def rest(host: Host) -> None:
    host.run_until(lambda: host.is_at_rest, timeout_seconds=RECOVERY_SECONDS)


def expect_nothing(
    world: FaultyWorld, resetting: Host, other: Host, watched_seconds: float = WATCHED_SECONDS
) -> None:
    """No key in the engine, nothing in the books of who reset it, no such event; and for long."""
    until = time.monotonic() + watched_seconds
    while time.monotonic() < until:
        for host in (resetting, other):
            host.step(time.monotonic())
        assert readable(world, resetting) == set()
        assert engine_contents(resetting) == set()
        assert not [key for tier, key in resetting.contents if tier == world.tier]
        threading.Event().wait(0.05)
    for host in (resetting, other):
        follow(world, host)
    for prompt in PROMPTS:
        asked(resetting, prompt)
        assert held(resetting, prompt) == 0


def follow(world: FaultyWorld, host: Host) -> None:
    """Until a listing has told the instance what the engine holds."""
    host.run_until(
        lambda: engine_contents(host) <= readable(world, host), timeout_seconds=RECOVERY_SECONDS
    )
