"""Encrypted towards clients, and towards engines whose certificates are judged."""

import ssl
from pathlib import Path
from typing import Any

import pytest
from certificates import make_certificate
from fake_engine import FakeEngine
from router_world import eventually, run, world

from opal_connector.cluster.router.config import router_config
from opal_connector.cluster.router.instances import Health
from opal_connector.config import ConfigError

PROMPT = list(range(320))


def test_it_speaks_tls_when_it_is_told_to(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)

    async def body() -> None:
        security = {"tls_certificate": str(certificate), "tls_key": str(key)}
        async with world(FakeEngine("one"), security=security) as made:
            context = ssl.create_default_context(cafile=str(certificate))
            url = f"https://127.0.0.1:{made.server.port}/v1/completions"
            asked = {"prompt": PROMPT, "stream": True}
            async with made.client.post(url, json=asked, ssl=context) as answer:
                assert answer.status == 200
                assert b"[DONE]" in await answer.read()

    run(body())


def test_an_engine_behind_tls_is_used_by_the_certificates_given_for_it_and_by_no_others(
    tmp_path: Path,
) -> None:
    certificate, key = make_certificate(tmp_path)

    async def body() -> None:
        one = FakeEngine("one")
        one.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        one.tls.load_cert_chain(certificate, key)
        await one.start()
        try:
            instances = [one.config(ca_file=str(certificate))]
            async with world(instances=instances) as made:
                for _ in range(3):
                    assert (await made.ask(PROMPT))[:2] == (200, "one")
                await made.knows(one, PROMPT)
            async with world(instances=[one.config()]) as made:  # the system does not know it
                assert (await made.ask(PROMPT))[0] == 503
                instance = made.core.fleet.get("one")
                assert instance is not None
                await eventually(lambda: instance.health is not Health.NEW)
                assert instance.health is not Health.UP
            assert sum(path == "/v1/completions" for path, _, _ in one.seen) == 3
        finally:
            await one.close()

    run(body())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"url": "http://a:1", "ca_file": "f"},
            "instances[0].ca_file: found 'f', allowed: nothing",
        ),
        ({"url": "https://a:1", "verify": False}, "instances[0].verify: unknown field; allowed"),
    ],
)
def test_certificates_are_judged_always(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_config({"instances": [given]})
    assert str(caught.value).startswith(sentence)


def test_a_file_without_certificates_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "empty.pem"
    path.write_text("nothing")

    async def body() -> None:
        for ca_file in (str(path), str(tmp_path / "absent.pem")):
            with pytest.raises(
                ConfigError, match=r"ca_file: found .*, which holds no certificates"
            ):
                async with world(instances=[{"url": "https://127.0.0.1:1", "ca_file": ca_file}]):
                    pass

    run(body())
