"""The server module: what is announced is what LMCache holds, whatever happens."""

import random

import pytest

pytest.importorskip("lmcache", reason="not installed here: scripts/test-lmcache runs this")

from l2_world import until
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.mp_observability.event import Event, EventType
from module_world import CHUNK_TOKENS, LAYOUT, build_context, prompts, server

from opal_connector.config import ConfigError
from opal_connector.events import Copy, Delete, Insert
from opal_connector.integrations.lmcache.bindings import Link, TokenBindings
from opal_connector.integrations.lmcache.server_module import build_server_modules
from opal_connector.keys import RequestIdentity, TokenChain

HOST = (0, "CPUMemory")
MOCK = {"type": "mock", "max_size_gb": 0.01, "mock_bandwidth_gb": 10}
PROMPT = list(range(100, 100 + 5 * CHUNK_TOKENS))


# ---- tokens ----


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_chunks_are_named_as_opals_own_chain_names_them(salt: str) -> None:
    """The router hashes a prompt with Opal's chain: equal digests are what makes a match."""
    bindings = TokenBindings(CHUNK_TOKENS)
    names = [bytes([number]) * 32 for number in range(5)]
    for place in reversed(range(5)):  # the last first: only the order of the chain counts
        tokens = PROMPT[place * CHUNK_TOKENS : (place + 1) * CHUNK_TOKENS]
        assert bindings.bind(names[place], names[place - 1] if place else None, tokens)
    chain = TokenChain(RequestIdentity(cache_salt=salt or None), CHUNK_TOKENS)
    chain.extend(PROMPT)
    found = [bindings.link(name, salt) for name in names]
    assert [link.digest for link in found if isinstance(link, Link)] == chain.hashes
    assert [link.parent for link in found if isinstance(link, Link)][1:] == chain.hashes[:-1]


def test_a_chunk_whose_beginning_is_unknown_says_what_is_missing() -> None:
    """Without the tokens of all chunks before it nobody can hash it."""
    bindings = TokenBindings(CHUNK_TOKENS)
    assert bindings.bind(b"second", b"first", [1, 2, 3, 4])
    assert bindings.link(b"second", "") == b"first"
    assert bindings.link(b"other", "") == b"other"
    assert not bindings.bind(b"short", None, [1, 2, 3])
    assert not bindings.bind(b"negative", None, [1, 2, 3, -4])


def test_bindings_are_bounded_and_a_loop_of_parents_ends() -> None:
    """Neither a long life nor a wrong event costs memory or the thread."""
    bindings = TokenBindings(CHUNK_TOKENS, most_chunks=10)
    for number in range(100):
        bindings.bind(number.to_bytes(4, "big"), None, [number] * CHUNK_TOKENS)
        bindings.link(number.to_bytes(4, "big"), "")
    assert len(bindings) == 10
    bindings.bind(b"a", b"b", [1] * CHUNK_TOKENS)
    bindings.bind(b"b", b"a", [1] * CHUNK_TOKENS)
    assert isinstance(bindings.link(b"a", ""), bytes)


# ---- L1 ----


def test_a_store_is_an_insert_and_an_eviction_a_delete() -> None:
    """The simplest life of a chunk, with its digests."""
    with server() as world:
        keys = world.store(PROMPT)
        world.settle(world.held)
        assert [type(event) for event in world.events] == [Insert] * 5
        world.manager.delete_l1_keys(keys[2:])
        world.settle(world.held)
        assert len(world.announced()[HOST]) == 2
        assert [type(event) for event in world.events[5:]] == [Delete] * 3
        world.manager.clear(force=True)  # LMCache does not say which L1 it was
        world.settle(world.held)
        assert world.announced() == {}


def test_a_chunk_is_there_when_all_its_ranks_are() -> None:
    """A part of a chunk is worth nothing; and it is announced once, not once for each rank."""
    with server() as world:
        world.tell_tokens(PROMPT)
        first = world.keys(PROMPT, workers=[0], world_size=2)
        world.write(first)
        world.drain()
        assert world.events == []
        world.write(world.keys(PROMPT, workers=[1], world_size=2))
        world.drain()
        assert [type(event) for event in world.events] == [Insert] * 5
        world.manager.delete_l1_keys(first[:1])
        world.drain()
        assert [type(event) for event in world.events[5:]] == [Delete]
        assert len(world.announced()[HOST]) == 4


def test_object_groups_are_groups_of_the_channel() -> None:
    """Which groups a hit needs is the reader's to say: a window needs only the last chunks."""
    with server() as world:
        world.tell_tokens(PROMPT)
        world.write(world.keys(PROMPT, group=0))
        world.write(world.keys(PROMPT, group=1)[3:])
        world.drain()
        found = world.announced()
        assert (len(found[0, "CPUMemory"]), len(found[1, "CPUMemory"])) == (5, 2)


def test_tenants_have_digests_of_their_own() -> None:
    """LMCache's hash does not tell tenants apart, the chain that the router asks with does."""
    with server() as world:
        world.store(PROMPT, salt="one")
        world.store(PROMPT, salt="two")
        world.settle(world.held)
        assert len(world.announced()[HOST]) == 10


def test_events_without_keys_mean_nothing() -> None:
    """LMCache publishes them all the time."""
    with server() as world:
        world.store(PROMPT)
        for kind in (EventType.L1_KEYS_EVICTED, EventType.L1_WRITE_FINISHED):
            world.bus.publish(Event(kind, metadata={"l1_tag": "_default", "keys": [], "meta": []}))
        world.settle(world.held)
        assert len(world.events) == 5
        assert world.module.report_status()["opal_events"]["failures"] == 0


# ---- what is not announced ----


def test_chunks_without_tokens_are_counted_and_announced_when_these_come() -> None:
    """What cannot be hashed cannot be found by anybody; it is not lost for that."""
    with server() as world:
        world.write(world.keys(PROMPT))
        world.drain()
        assert world.events == []
        assert world.module.report_status()["opal_events"]["chunks_without_tokens"] == 5
        world.tell_tokens(PROMPT, first_chunk=2)  # of no use yet: the beginning is unknown
        world.drain()
        assert world.events == []
        world.tell_tokens(PROMPT[: 2 * CHUNK_TOKENS])
        world.settle(world.held)
        assert world.module.report_status()["opal_events"]["chunks_without_tokens"] == 0


def test_the_tokens_of_a_request_that_hits_are_learned_from_its_session() -> None:
    """What was stored in another life, or by a transfer that tells no tokens, is found again."""
    with server() as world:
        world.write(world.keys(PROMPT))
        world.context.session_manager.get_or_create("request").set_tokens(list(PROMPT))
        facts = {"found_count": 5, "model_name": "model"}
        world.bus.publish(
            Event(EventType.MP_LOOKUP_PREFETCH_END, metadata=facts, session_id="request")
        )
        world.settle(world.held)
        assert len(world.announced()[HOST]) == 5


def test_a_continued_prompt_whose_beginning_is_from_another_life_is_announced_whole() -> None:
    """A store of later chunks names the one before; its session knows the rest."""
    with server() as world:
        world.write(world.keys(PROMPT))
        world.context.session_manager.get_or_create("request").set_tokens(list(PROMPT))
        world.tell_tokens(PROMPT, first_chunk=3, session="request")
        world.settle(world.held)
        assert len(world.announced()[HOST]) == 5


def test_a_chunk_that_leaves_before_its_tokens_come_is_never_announced() -> None:
    """Late tokens do not bring back what is gone."""
    with server() as world:
        keys = world.keys(PROMPT)
        world.write(keys)
        world.manager.delete_l1_keys(keys)
        world.tell_tokens(PROMPT)
        world.settle(world.held)
        assert world.events == []
        assert world.module.report_status()["opal_events"]["chunks_without_tokens"] == 0


def test_a_channel_is_about_one_model_and_others_are_counted() -> None:
    """Equal tokens of another model are not the same."""
    with server(model="wanted") as world:
        world.store(PROMPT, model="other")
        world.store(PROMPT[: 2 * CHUNK_TOKENS], model="wanted")
        world.drain()
        assert len(world.announced()[HOST]) == 2
        status = world.module.report_status()["opal_events"]
        assert (status["model"], status["chunks_of_other_models"]) == ("wanted", 5)


# ---- L2 ----


def test_a_store_to_an_adapter_is_a_copy_and_its_eviction_a_delete() -> None:
    """LMCache mirrors: both tiers have it, and each loses it by itself."""
    with server(MOCK) as world:
        keys = world.store(PROMPT)

        digests = set(world.digests.values())
        world.settle(lambda: {HOST: digests, (0, "mock"): digests})
        assert {type(event) for event in world.events[5:]} == {Copy}
        world.manager.l2_adapters()[0][1].delete(keys[3:])
        world.drain()
        assert len(world.announced()[0, "mock"]) == 3
        assert len(world.announced()[HOST]) == 5


def test_what_is_loaded_from_an_adapter_is_a_copy_into_host_memory() -> None:
    """LMCache prefetches a hit into L1, and by default drops it there after its use."""
    with server(MOCK) as world:
        keys = world.store(PROMPT)
        digests = set(world.digests.values())
        world.settle(lambda: {HOST: digests, (0, "mock"): digests})
        until(lambda: world.manager.delete_l1_keys(keys)[1] == 0, "no lock is left")
        world.settle(lambda: {(0, "mock"): digests})
        begun = len(world.events)
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, LAYOUT)])
        handle = world.manager.submit_prefetch_task(spec)
        until(lambda: world.manager.query_prefetch_status(handle), "the prefetch")
        world.settle(lambda: {HOST: digests, (0, "mock"): digests})
        assert {type(event) for event in world.events[begun:]} == {Copy}
        world.manager.finish_read_prefetched(keys)
        world.settle(lambda: {(0, "mock"): digests})


def test_what_an_adapter_held_is_gone_with_it() -> None:
    """Adapters can be taken away at run time, and LMCache names no keys then."""
    with server(MOCK) as world:
        world.store(PROMPT)
        digests = set(world.digests.values())
        world.settle(lambda: {HOST: digests, (0, "mock"): digests})
        world.manager.delete_l2_adapter(0)
        world.settle(lambda: {HOST: digests})


# ---- losses ----


def test_after_dropped_events_what_is_there_is_announced() -> None:
    """A full bus loses stores and evictions alike; neither stays wrong."""
    with server(queue_size=6) as world:
        kept = world.store(PROMPT)
        world.settle(world.held)
        for prompt in prompts(1, 6):
            world.store(prompt)
        world.manager.delete_l1_keys(kept)
        assert world.bus.dropped_events_count() > 0
        world.drain()
        for prompt in prompts(1, 6):  # their tokens may have been lost with the rest
            world.tell_tokens(prompt)
            world.drain()
        world.settle(world.held)
        status = world.module.report_status()["opal_events"]
        assert status["resyncs"] >= 1
        assert status["dropped_events"] > 0


def test_after_dropped_events_what_cannot_be_listed_is_forgotten() -> None:
    """An adapter that does not say what it has is not believed to have what it had."""
    with server(MOCK, queue_size=200) as world:
        world.store(PROMPT)
        digests = set(world.digests.values())
        world.settle(lambda: {HOST: digests, (0, "mock"): digests})
        for _ in range(300):
            world.bus.publish(Event(EventType.L1_READ_FINISHED))
        world.drain()
        world.settle(lambda: {HOST: digests})


def test_an_event_that_cannot_be_read_does_not_leave_the_contents_wrong() -> None:
    """Whatever it was about, the contents are listed anew."""
    with server() as world:
        keys = world.store(PROMPT)
        world.drain()
        world.bus.publish(Event(EventType.L1_KEYS_EVICTED, metadata={"keys": keys}))
        world.settle(world.held)
        assert len(world.announced()[HOST]) == 5
        assert world.module.report_status()["opal_events"]["failures"] == 1


def test_many_events_that_cannot_be_read_are_one_listing() -> None:
    """A newer LMCache whose events look otherwise must not keep the bus busy with listings."""
    with server() as world:
        keys = world.store(PROMPT)
        world.drain()
        for _ in range(100):
            world.bus.publish(Event(EventType.L1_KEYS_EVICTED, metadata={"keys": keys}))
        world.drain()
        status = world.module.report_status()["opal_events"]
        assert (status["failures"], status["resyncs"]) == (100, 1)
        world.settle(world.held)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_announced_is_what_lmcache_holds_after_any_stores_evictions_and_drops(
    seed: int,
) -> None:
    """The property that everything else serves; with ranks, tenants, full L1s and lost events."""
    numbers = random.Random(seed)
    texts = prompts(seed, 10)
    with server(l1_mib=0.25, queue_size=numbers.choice([4, 30, 10_000])) as world:
        for _ in range(120):
            text = numbers.choice(texts)[: CHUNK_TOKENS * numbers.randrange(1, 7)]
            salt = numbers.choice(["", "tenant"])
            match numbers.randrange(6):
                case 0 | 1:
                    world.store(text, salt=salt)
                case 2:
                    keys = world.keys(text, salt=salt)
                    world.manager.delete_l1_keys(numbers.sample(keys, numbers.randrange(len(keys))))
                case 3:
                    world.drain()
                case 4:
                    world.write(world.keys(text, salt=salt))
                case 5 if numbers.random() < 0.1:
                    world.manager.clear(force=numbers.random() < 0.5)
        world.drain()
        for text in texts:
            world.tell_tokens(text)
            world.drain()
        world.settle(world.held)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"event": {}}, "event: unknown field; allowed here: model, served_model_name"),
        ({"model": ""}, "model: found '', allowed: any other text"),
        ({"instance_id": ""}, "instance_id: found ''"),
        ({"events": {"endpoint": "here"}}, "events.endpoint: found 'here', allowed: tcp://"),
        ({"events": {"heartbeat_seconds": 0}}, "events.heartbeat_seconds: found 0"),
        ({"kvcevent_coalesce_time": "soon"}, "kvcevent_coalesce_time: found 'soon'"),
    ],
)
def test_a_mistake_in_the_configuration_is_one_sentence(
    config: dict[str, object], sentence: str
) -> None:
    """It names the field, what was found and what is allowed, before anything is opened."""
    with server() as world, pytest.raises(ConfigError) as caught:
        build_server_modules(build_context(world.context, config))
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_server_without_events_is_refused() -> None:
    """LMCache can be started without its bus, and then nothing would ever be announced."""
    with pytest.raises(ConfigError, match="event bus off"), server(is_observed=False):
        pass
