"""Wrong hits: two requests share KV exactly when their KV is the same."""

import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from byte_model import Identity
from engine_without_model import Engine
from vllm.distributed.kv_events import BlockStored
from vllm_parts import prompt

from opal_connector.integrations.vllm import identity as request_identities
from opal_connector.integrations.vllm.kv_events import external_hash
from opal_connector.keys import (
    LoraIdentity,
    MultimodalSpan,
    OpalTokenDatabase,
    RequestIdentity,
    directory_fingerprint,
)

pytestmark = pytest.mark.vllm

NONE = Identity()
PLACEHOLDER = [9] * 64  # what stands in the tokens for every image


def hits(engine: Engine, name: str, tokens: list[int], identity: Identity, **options: str) -> int:
    """The hit tokens of one more request on an empty device."""
    engine.forget_device()
    result = engine.generate(name, tokens, identity=identity, **options)
    engine.assert_answers(name)
    return result.hit_tokens


@pytest.mark.parametrize(
    "identities",
    [
        pytest.param([Identity(lora="a"), Identity(lora="b"), NONE], id="lora"),
        pytest.param([Identity(salt="x"), Identity(salt="y"), NONE], id="salt"),
        pytest.param(
            [Identity(lora="a", salt="x"), Identity(lora="x", salt="a"), Identity(salt="a")],
            id="lora_and_salt",
        ),
    ],
)
def test_ht_20_and_23_adapters_and_salts_never_share(identities: list[Identity]) -> None:
    """Equal tokens under another adapter or salt hit nothing; under the same they hit all."""
    engine = Engine()

    for number, identity in enumerate(identities):
        assert hits(engine, f"cold{number}", prompt(1, 100), identity) == 0
    for number, identity in enumerate(identities):
        assert hits(engine, f"warm{number}", prompt(1, 100), identity) == 96

    engine.assert_idle()


def test_ht_20_adapter_is_told_by_its_bytes(tmp_path: Path) -> None:
    """The same name and path with other weights is another adapter."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"first")
    engine = Engine()
    identity = Identity(lora="same")

    def ask(name: str) -> int:
        engine.forget_device()
        engine.add(name, prompt(1, 100), identity=identity, lora_path=str(adapter))
        engine.run()
        return engine.results[name].hit_tokens

    assert [ask("cold"), ask("warm")] == [0, 96]
    weights.write_bytes(b"other")
    assert [ask("other"), ask("other_warm")] == [0, 96]
    engine.assert_idle()


@pytest.fixture
def slow_adapter(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No adapter is read before this is set."""
    may_read = threading.Event()

    def read_slowly(path: str) -> str:
        assert may_read.wait(30)
        return path

    monkeypatch.setattr(request_identities, "_fingerprint", read_slowly)
    return may_read


def test_adapter_that_takes_long_to_read_is_not_waited_for(slow_adapter: threading.Event) -> None:
    """After a second the request runs uncached; later ones are cached again."""
    engine = Engine()
    engine.add("a", prompt(1, 64), identity=Identity(lora="slow"))
    for _ in range(5):
        engine.step()
    assert {lookup.matched_tokens for lookup in engine.lookups} == {None}
    engine.clock.now += 1.01
    engine.run()
    assert engine.held_hashes() == set()
    slow_adapter.set()

    assert hits(engine, "cold", prompt(1, 64), Identity(lora="slow")) == 0
    assert hits(engine, "warm", prompt(1, 64), Identity(lora="slow")) == 48
    engine.assert_answers("a")
    engine.assert_idle()
    engine.close()


@pytest.mark.parametrize("skip_reading", [False, True])
def test_adapter_read_while_the_request_runs_is_in_time_to_store(
    skip_reading: bool, slow_adapter: threading.Event
) -> None:
    """What could not be looked up is stored all the same, also if nobody wanted to look it up."""
    engine = Engine()
    identity = Identity(lora="slow")
    engine.add(
        "a", prompt(1, 64), max_tokens=30, identity=identity, skip_reading=skip_reading or None
    )
    engine.step()
    engine.clock.now += 1.01
    engine.step()
    tracker = engine.half._trackers["a"]
    slow_adapter.set()
    assert tracker.lora_fingerprint.result(30)
    engine.run()

    assert hits(engine, "warm", prompt(1, 64), identity) == 48
    engine.assert_answers("a")
    engine.assert_idle()
    engine.close()


def test_ht_23_prompt_embeddings_are_never_looked_up_or_stored() -> None:
    """Without token ids there is nothing to name KV by: the answer is 0, never negative."""
    engine = Engine(prefix_caching=False)
    engine.generate("text", [0] * 100)  # what vLLM puts in place of the missing ids
    before = engine.held_hashes()
    for name in ("one", "two"):
        engine.add(name, None, prompt_embeds=torch.ones(100, 4))
    engine.add(
        "mixed",
        [0] * 100,
        prompt_embeds=torch.ones(100, 4),
        prompt_is_token_ids=[True] * 50 + [False] * 50,
    )
    engine.run()

    asked = {
        (lookup.matched_tokens, lookup.is_async)
        for lookup in engine.lookups
        if lookup.request_id != "text"
    }
    assert asked == {(0, False)}
    assert engine.held_hashes() == before
    assert engine.results["one"].finish_reason == "length"
    engine.assert_idle()


IMAGES = {
    "h1 at 0": ("h1", 0, 24),
    "h2 at 0": ("h2", 0, 24),
    "h1 at 8": ("h1", 8, 24),
    "h2 at 8": ("h2", 8, 24),
}


@pytest.mark.parametrize("stored", IMAGES)
@pytest.mark.parametrize("asked", IMAGES)
def test_ht_24_images_share_only_in_the_same_place(stored: str, asked: str) -> None:
    """Equal placeholders hit only with the same image at the same offset."""
    engine = Engine()
    tokens = [*PLACEHOLDER, *prompt(1, 20)]
    assert hits(engine, "cold", tokens, Identity(images=(IMAGES[stored],))) == 0

    hit = hits(engine, "warm", tokens, Identity(images=(IMAGES[asked],)))

    assert hit == (80 if stored == asked else 0)
    engine.assert_idle()


def test_ht_24_what_precedes_an_image_is_shared() -> None:
    """The text before two different images hits; nothing from the first image's block on does."""
    engine = Engine()
    tokens = [*prompt(1, 40), *PLACEHOLDER]
    hits(engine, "cold", tokens, Identity(images=(("h1", 40, 30),)))

    assert hits(engine, "other_image", tokens, Identity(images=(("h2", 40, 30),))) == 32
    assert hits(engine, "same_image", tokens, Identity(images=(("h1", 40, 30),))) == 96
    two = (("h1", 40, 30), ("h3", 75, 5))
    assert hits(engine, "second_image", tokens, Identity(images=two)) == 64
    engine.assert_idle()


def chain(identity: RequestIdentity, tokens: list[int]) -> list[bytes]:
    """The block hashes, computed from a request's facts as a router would."""
    chain = OpalTokenDatabase(block_tokens=16, chunk_blocks=1).chain(identity)
    chain.extend(tokens)
    return chain.hashes


@pytest.mark.parametrize("kind", ["base", "lora", "salt", "images", "all"])
def test_ht_28_events_name_blocks_as_a_router_would(kind: str, tmp_path: Path) -> None:
    """The hashes in the stream are those of the chain over the request's own facts."""
    (tmp_path / "adapter_config.json").write_text("{}")
    images = (("h1", 8, 24), ("h2", 60, 4))
    identity = Identity(
        lora="a" if kind in ("lora", "all") else "",
        salt="x" if kind in ("salt", "all") else "",
        images=images if kind in ("images", "all") else (),
    )
    lora = LoraIdentity(name="a", path=str(tmp_path), fingerprint=directory_fingerprint(tmp_path))
    facts = RequestIdentity(
        lora=lora if identity.lora else None,
        cache_salt=identity.salt or None,
        multimodal=tuple(
            MultimodalSpan(identifier=name, offset_tokens=offset, length_tokens=length)
            for name, offset, length in identity.images
        ),
    )
    engine = Engine()
    engine.add("a", prompt(1, 100), max_tokens=20, identity=identity, lora_path=str(tmp_path))
    engine.run()
    tokens = [*prompt(1, 100), *engine.results["a"].tokens]
    stored = [e for e in engine.events if isinstance(e, BlockStored) and e.medium == "CPU"]

    announced = [block_hash for event in stored for block_hash in event.block_hashes]
    assert announced == [external_hash(digest) for digest in chain(facts, tokens)[:7]]
    assert len(announced) == 7
    assert [token for event in stored for token in event.token_ids] == tokens[:112]
    parents = [event.parent_block_hash for event in stored]
    assert parents == [None, *[event.block_hashes[-1] for event in stored[:-1]]]
    assert {event.lora_name for event in stored} == {identity.lora or None}
    assert {event.block_size for event in stored} == {16}
