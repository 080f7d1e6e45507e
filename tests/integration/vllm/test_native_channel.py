"""Opal's event channel beside vLLM's real scheduler: device and tiers are what it says they are."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from byte_model import Identity
from engine_without_model import Engine
from publisher_world import Listener, blocks_in, books_blocks, held, wait_until
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm_parts import announced, prompt, replay

from opal_connector.cluster import publisher as publisher_module
from opal_connector.cluster.publisher import Publisher
from opal_connector.events.channel import Description, TierDescription
from opal_connector.integrations.vllm.guard import hook_faults
from opal_connector.keys import LoraIdentity, MultimodalSpan, RequestIdentity, TokenChain

pytestmark = pytest.mark.vllm

EVENTS = {"endpoint": "tcp://127.0.0.1:0", "heartbeat_seconds": 0.1}
DEVICE = (0, "Device")


class World:
    """Engines with a channel, and what vLLM's hashes mean.

    Mutable state: the engines and the digests by vLLM's hashes.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.engines: list[Engine] = []
        self.digests: dict[bytes, bytes] = {}

    def engine(self, channel: dict[str, Any] | None = None, **options: Any) -> Engine:
        config = self._directory / f"{len(self.engines)}.json"
        config.write_text(json.dumps({"events": EVENTS | (channel or {}), "instance_id": "engine"}))
        options = {"events": False, "kvcevent_coalesce_time": 0.01} | options
        engine = Engine(opal_config=str(config), **options)
        engine.half._clock = time.monotonic  # vLLM's stream waits for it
        self.engines.append(engine)
        publisher = self.publisher(engine)
        wait_until(lambda: publisher.publish_endpoint, "the channel to open")
        return engine

    def publisher(self, engine: Engine) -> Publisher:
        return engine.half.events.channel.publisher

    def generate(
        self, engine: Engine, request_id: str, tokens: Sequence[int], **options: Any
    ) -> None:
        request = engine.add(request_id, tokens, **options)
        engine.run()
        identity: Identity = options.get("identity") or Identity()
        chain = TokenChain(
            RequestIdentity(
                LoraIdentity(identity.lora, "/nowhere", "name:/nowhere") if identity.lora else None,
                identity.salt or None,
                tuple(MultimodalSpan(*image) for image in identity.images),
            ),
            engine.block_tokens,
        )
        chain.extend(list(request.all_token_ids))
        self.digests.update(zip(request.block_hashes, chain.hashes, strict=False))

    def on_device(self, engine: Engine) -> set[bytes]:
        """What vLLM's own map says, by Opal's digests."""
        cached = engine.pool.cached_block_hash_to_block._cache
        return {self.digests[get_block_hash(key)] for key in cached}

    def expected(self, engine: Engine) -> dict[tuple[int, str], set[bytes]]:
        return held({**books_blocks(engine.manager), DEVICE: self.on_device(engine)})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """No hook may have failed in any of its engines."""
    hook_faults.clear()
    made = World(tmp_path)
    yield made
    for engine in made.engines:
        engine.close()
        assert not made.publisher(engine).is_alive
    assert hook_faults == {}


IDENTITIES = [
    Identity(),
    Identity(),
    Identity(salt="pepper"),
    Identity(lora="tuned"),
    Identity(lora="tuned", salt="pepper"),
    Identity(images=(("cat", 3, 40),)),
    Identity(images=(("cat", 3, 13), ("dog", 17, 30))),
]


@pytest.mark.parametrize("publishes", [False, True], ids=["channel alone", "beside vLLM's stream"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_channel_is_the_device_and_the_tiers(world: World, publishes: bool, is_async: bool) -> None:
    """Evictions, second copies, adapters, salts, images, reports and resets of device and tiers."""
    engine = world.engine(events=publishes, async_steps=is_async, num_blocks=40, tier_blocks=60)
    generator = random.Random(3)
    with Listener(world.publisher(engine)) as listener:
        for number in range(120):
            tokens = prompt(generator.randrange(6), generator.randrange(20, 200))
            identity = IDENTITIES[number % len(IDENTITIES)]
            world.generate(
                engine,
                f"r{number}",
                tokens,
                identity=identity,
                skip_reading=generator.random() < 0.3,
                max_tokens=generator.randrange(1, 30),
            )
            if number % 40 == 20:
                engine.forget_device()
                engine.run()
            if number == 60:
                engine.scheduler.reset_connector_cache()
            if number % 10 == 9:
                wait_until(lambda: listener.present() == world.expected(engine), "the contents")
        assert blocks_in(listener.contents("Device")) == world.on_device(engine)
        assert blocks_in(listener.contents("CPUMemory")) == engine.held_hashes()
        counts = {tier: len(blocks) for (_, tier), blocks in world.expected(engine).items()}
        wait_until(
            lambda: (
                counts == {digest.tier: digest.block_count for digest in listener.beats[-1].digests}
            ),
            "the digests",
        )
    if publishes:
        assert replay(engine.events) == announced(engine.held_hashes())
        assert any(
            isinstance(event, BlockStored) and event.medium == "GPU" for event in engine.events
        )
    else:
        assert engine.events == []
    engine.assert_idle()


def test_a_reset_of_an_idle_engine_reaches_the_channel(world: World) -> None:
    engine = world.engine()
    with Listener(world.publisher(engine)) as listener:
        world.generate(engine, "a", prompt(1, 100))
        wait_until(lambda: listener.present().get(DEVICE) == world.on_device(engine), "the device")
        engine.forget_device()
        assert engine.connector.has_pending_push_work()
        engine.step()
        assert not engine.connector.has_pending_push_work()
        wait_until(lambda: DEVICE not in listener.present(), "the device to be empty")
        assert listener.present() == held(books_blocks(engine.manager))


@pytest.mark.parametrize("publishes", [False, True])
def test_a_full_report_leaves_no_phantom(world: World, publishes: bool) -> None:
    """`kv_cache_report_mode` names blocks again that are there; they leave once."""
    engine = world.engine(events=publishes, num_blocks=30)
    with Listener(world.publisher(engine)) as listener:
        for number in range(5):
            request = engine.make_request(f"r{number}", prompt(1, 100))
            request.kv_cache_report_mode = "full"
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "make_request", lambda *args, made=request, **options: made)
                world.generate(engine, f"r{number}", prompt(1, 100))
        if publishes:
            stored = [event for event in engine.events if isinstance(event, BlockStored)]
            assert sum(event.medium == "GPU" for event in stored) == 1 + 4, "one store, and reports"
        world.generate(engine, "other", prompt(2, 400))
        wait_until(lambda: listener.present() == world.expected(engine), "the contents")
        assert len(world.on_device(engine)) < 29


def test_the_description_and_the_load_are_those_of_the_engine(world: World) -> None:
    engine = world.engine()
    with Listener(world.publisher(engine)) as listener:
        before = listener.beats[-1].system
        assert before.queue_depth == before.running == 0
        assert before.prefill_tokens_per_second is None
        for number in range(3):
            world.generate(engine, f"r{number}", prompt(number % 2, 300), max_tokens=2)
            engine.forget_device()
        engine.add("live", prompt(5, 100), max_tokens=50)
        engine.step()
        engine.step()
        engine.add("queued", prompt(6, 100))
        wait_until(lambda: listener.beats[-1].system.queue_depth == 2, "the queue")
        system = listener.beats[-1].system
        assert (system.running, system.waiting) == (1, 1)
        assert system.device_usage == pytest.approx(engine.pool.get_usage())
        assert system.prefill_tokens_per_second is not None
        assert 0 < system.prefill_tokens_per_second < 1e8
        (tier,) = system.tiers
        manager = engine.manager
        assert (tier.used_bytes, tier.capacity_bytes) == (
            manager.storage.tiers[0].used_bytes,
            manager.storage.tiers[0].capacity_bytes,
        )
        assert tier.load_seconds_per_byte is not None
        assert tier.store_seconds_per_byte is not None
        assert system.chunk_bytes * 64 == tier.capacity_bytes // 2
        world.generate(engine, "tuned", prompt(7, 50), identity=Identity(lora="tuned"))
        wait_until(lambda: listener.beats[-1].revision == 1, "the adapter")
        described = listener.description()
        assert isinstance(described, Description)
        instance = described.instance
        assert (instance.instance_id, instance.block_tokens, instance.chunk_blocks) == (
            "engine",
            16,
            2,
        )
        assert instance.namespace == engine.half.books.metadata.namespace
        assert instance.tiers == (TierDescription("Device"), TierDescription("CPUMemory"))
        assert instance.adapters == (LoraIdentity("tuned", "/nowhere", "name:/nowhere"),)
        assert instance.model == engine.config.model_config.served_model_name
        engine.run()


def test_without_the_channel_nothing_changes() -> None:
    engine = Engine(events=False)
    assert engine.half.events.channel is None
    assert engine.half.events.log.listener is None
    assert "take_events" not in vars(engine.pool)
    assert not engine.pool.enable_kv_cache_events
    engine.generate("a", prompt(1, 100))
    assert engine.pool.kv_event_queue == []
    records = engine.manager.storage.tiers[0].index.records.values()
    assert all(record.tokens == b"" for record in records)
    engine.assert_idle()


def test_with_the_channel_alone_the_books_keep_no_tokens(world: World) -> None:
    engine = world.engine()
    world.generate(engine, "a", prompt(1, 100))
    records = engine.manager.storage.tiers[0].index.records.values()
    assert all(record.tokens == b"" for record in records)
    assert len(engine.half.events.log) == 0


def test_an_engine_whose_port_is_in_use_works_and_has_its_channel_as_soon_as_it_is_free(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first = world.engine()
    endpoint = world.publisher(first).endpoint
    assert endpoint is not None
    config = world._directory / "second.json"
    config.write_text(json.dumps({"events": {"endpoint": endpoint.announced}}))
    second = Engine(events=False, opal_config=str(config))
    world.engines.append(second)
    publisher = world.publisher(second)
    wait_until(lambda: "the event channel is off until" in caplog.text)
    second.generate("a", prompt(1, 100))
    assert publisher.publish_endpoint is None
    world.publisher(first).close()
    wait_until(lambda: publisher.publish_endpoint, "the channel to open")
    assert publisher.endpoint == endpoint
    second.forget_device()
    second.generate("b", prompt(1, 100))
    second.assert_idle()


def test_a_fault_of_the_tap_does_not_reach_vllm(world: World) -> None:
    engine = world.engine(events=True)
    tap = engine.half.events.channel.tap
    tap._hear = None
    world.generate(engine, "a", prompt(1, 100))
    assert hook_faults.pop("take_events") > 0
    assert replay(engine.events, medium="GPU") != set()
    engine.assert_idle()


def test_ranks_of_data_parallelism_shift_the_ports_and_have_names_of_their_own(
    world: World,
) -> None:
    engine = world.engine()
    endpoint = world.publisher(engine).endpoint
    assert endpoint is not None
    base = endpoint.port - 4
    with pytest.MonkeyPatch.context() as patch:
        world.publisher(engine).close()
        patch.setattr(Engine, "_make_worker", _as_rank_two(Engine._make_worker))
        second = world.engine({"endpoint": f"tcp://127.0.0.1:{base}"})
    publisher = world.publisher(second)
    assert publisher.endpoint is not None
    assert publisher.publish_endpoint is not None
    assert (publisher.endpoint.port, publisher.publish_endpoint.port) == (base + 4, base + 5)
    with Listener(publisher) as listener:
        assert listener.beats[0].instance_id == "engine/dp2"


def _as_rank_two(make: Any) -> Any:
    def made(engine: Engine, *args: Any) -> Any:
        engine.config.parallel_config.data_parallel_rank = 2
        return make(engine, *args)

    return made


def _sharing(world: World, path: Path, **options: Any) -> Engine:
    return world.engine(
        kvc_tiers=["CPUMemory", "DistributedFS"],
        DistributedFS={"path": str(path), "capacity_GB": "16MiB"},
        **options,
    )


def _tiers(world: World, engine: Engine) -> tuple[TierDescription, ...]:
    with Listener(world.publisher(engine)) as listener:
        described = listener.description()
        assert isinstance(described, Description)
        return described.instance.tiers


def test_instances_that_mount_one_directory_announce_one_tier(world: World, tmp_path: Path) -> None:
    """Wherever they mount it; another model in it is another tier."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "here")
    first, second = _sharing(world, tmp_path / "here"), _sharing(world, tmp_path / "there")
    other = _sharing(world, tmp_path / "here", weights_id="another model")
    tiers = [_tiers(world, engine) for engine in (first, second, other)]
    assert [tier.name for tier in tiers[0]] == ["Device", "CPUMemory", "DistributedFS"]
    assert [tier.is_persistent for tier in tiers[0]] == [False, False, True]
    assert tiers[0] == tiers[1]
    shared_ids = {tier.shared_id for of_one in tiers for tier in of_one if tier.is_persistent}
    assert len(shared_ids) == 2
    assert "" not in shared_ids
    assert {tier.shared_id for of_one in tiers for tier in of_one if not tier.is_persistent} == {""}


def test_a_shared_directory_that_tells_no_name_is_announced_as_local_after_a_while(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "READY_SECONDS", 0.2)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "identity").write_text("half")
    engine = _sharing(world, tmp_path / "root")
    assert _tiers(world, engine)[-1] == TierDescription("DistributedFS", is_persistent=True)
    (tmp_path / "root" / "identity").write_text("ab" * 16)
    assert _tiers(world, engine)[-1].shared_id == ""
