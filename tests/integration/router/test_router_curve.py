"""Events that are encrypted, and that nobody reads whom the engine does not know."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import zmq.auth
from fake_engine import FakeEngine
from router_world import eventually, run, world

from opal_connector.cluster.curve import CurveServer
from opal_connector.cluster.ingest import SourceState
from opal_connector.cluster.router.config import router_config
from opal_connector.config import ConfigError, load_config

PROMPT = list(range(320))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Pairs of an engine, a router and a stranger."""
    for name in ("engine", "router", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    return tmp_path


def guarded_engine(keys: Path) -> FakeEngine:
    server = CurveServer(
        secret_key_file=str(keys / "engine.key_secret"),
        client_key_files=(str(keys / "router.key"),),
    )
    return FakeEngine("one", curve=server)


def shown(keys: Path, who: str, server: str = "engine") -> dict[str, str]:
    return {
        "server_key_file": str(keys / f"{server}.key"),
        "secret_key_file": str(keys / f"{who}.key_secret"),
    }


def test_who_is_known_follows_the_events(keys: Path) -> None:
    async def body() -> None:
        one, two = guarded_engine(keys), FakeEngine("two")
        await one.start()
        await two.start()
        try:
            instances = [one.config(events_curve=shown(keys, "router")), two.config()]
            async with world(instances=instances) as made:
                one.store(PROMPT)
                await made.knows(one, PROMPT)
                assert (await made.ask(PROMPT))[:2] == (200, "one")
                await one.restart()
                await eventually(lambda: not made.core.index.workers["one"].block_counts)
                one.store(PROMPT)
                await made.knows(one, PROMPT)
        finally:
            await two.close()
            await one.close()

    run(body())


@pytest.mark.parametrize("who", ["nobody", "stranger", "router, of another engine"])
def test_who_is_not_known_learns_nothing_and_requests_are_answered_all_the_same(
    keys: Path, who: str
) -> None:
    async def body() -> None:
        one = guarded_engine(keys)
        await one.start()
        shows: dict[str, Any] = {
            "nobody": {},
            "stranger": {"events_curve": shown(keys, "stranger")},
            "router, of another engine": {"events_curve": shown(keys, "router", "stranger")},
        }[who]
        try:
            async with world(instances=[]) as made:
                from opal_connector.cluster.router.config import instance_config

                await made.core.add(instance_config(one.config(**shows)))
                one.store(PROMPT)
                for _ in range(10):
                    assert (await made.ask(PROMPT))[0] == 200
                    await asyncio.sleep(0.02)
                (status,) = made.core.sources.feed.statuses()
                assert status.state is SourceState.INIT
                assert status.metrics.bytes == 0
                assert not made.core.index.workers
        finally:
            await one.close()

    run(body())


def test_a_key_that_cannot_be_used_is_one_sentence_without_what_is_in_it(keys: Path) -> None:
    (keys / "odd.key_secret").write_text('curve\n  secret-key = "a private word"\n')

    async def body() -> None:
        for who in ("odd", "absent"):
            instance = {
                "url": "http://127.0.0.1:1",
                "events": "tcp://127.0.0.1:1",
                "events_curve": shown(keys, who),
            }
            with pytest.raises(ConfigError, match=f"{who}.key_secret.*no CURVE key") as caught:
                async with world(instances=[instance]):
                    pass
            assert "private" not in str(caught.value)

    run(body())


@pytest.mark.parametrize(
    ("curve", "sentence"),
    [
        ({"client_key_files": []}, "events.curve.client_key_files: found none"),
        ({"client_key_files": ["/absent"]}, "events.curve.client_key_files: found '/absent'"),
        ({"secret_key_file": "/absent"}, "events.curve.secret_key_file: found '/absent'"),
        ({"other": 1}, "events.curve.other"),
    ],
)
def test_an_engines_keys_are_checked_when_it_starts(
    keys: Path, curve: dict[str, Any], sentence: str
) -> None:
    good = {
        "secret_key_file": str(keys / "engine.key_secret"),
        "client_key_files": [str(keys / "router.key")],
    }
    assert load_config({"events": {"curve": good}}).events is not None
    with pytest.raises(ConfigError) as caught:
        load_config({"events": {"curve": {**good, **curve}}})
    assert sentence in str(caught.value)


def test_keys_without_events_are_refused() -> None:
    given = {"url": "http://a:1", "events_curve": {"server_key_file": "a", "secret_key_file": "b"}}
    with pytest.raises(ConfigError, match=r"instances\[0\]\.events_curve: found .* without"):
        router_config({"instances": [given]})


def test_events_that_others_can_reach_without_a_key_are_warned_of(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from opal_connector.cli.server_process import free_port
    from opal_connector.config import Endpoint

    async def body() -> None:
        for one in (FakeEngine("open"), guarded_engine(keys)):
            await one.listen()
            await one._publish(Endpoint("0.0.0.0", free_port(2)))
            await one.close()

    with caplog.at_level(logging.WARNING, "opal_connector.cluster.publisher"):
        run(body())
    assert [text for text in caplog.messages if "can follow" in text] == [
        text for text in caplog.messages if "no events.curve is set" in text
    ]
    assert sum("no events.curve is set" in text for text in caplog.messages) == 1
