"""What a user may write about a router, and the sentence about what he may not."""

from pathlib import Path
from typing import Any

import pytest

from opal_connector.cluster.router.config import (
    RouterConfig,
    is_loopback,
    load_router_config,
    router_config,
)
from opal_connector.config import ConfigError

URL = "http://127.0.0.1:8001"


def test_a_file_says_everything_and_the_rest_is_as_it_should_be(tmp_path: Path) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(
        """
        port: 9000
        policy: maxprefix
        balanced: {evenness: 3}
        affinity: {mode: hard}
        instances:
          - {url: "http://10.0.0.1:8000", events: "tcp://10.0.0.1:5601", name: a}
          - {url: "https://b.example/v", events: ["tcp://b:5601", "tcp://b:5603"]}
          - {url: "http://[::1]:8000", vllm_events: {endpoint: "tcp://[::1]:5557"}}
          - {url: "http://c:8000", vllm_events: auto, api_key_env: KEY}
        """
    )
    config = load_router_config(path)
    assert (config.host, config.port, config.policy) == ("127.0.0.1", 9000, "maxprefix")
    assert [one.label for one in config.instances] == ["a", "b.example", "[::1]:8000", "c:8000"]
    assert config.instances[1].channels == ("tcp://b:5601", "tcp://b:5603")
    address = config.instances[1].address
    assert (address.host, address.port, address.is_tls, address.prefix) == (
        "b.example",
        443,
        True,
        "/v",
    )
    assert config.instances[2].address.host_header == "[::1]:8000"
    assert config.balanced.evenness == 3
    assert config.is_loopback
    assert router_config({}) == RouterConfig()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prot": 1}, "prot: unknown field; allowed here: host, port, workers, instances"),
        ({"port": "a"}, "port: found 'a'; expected `int`, got `str`"),
        ({"workers": 0}, "workers: found 0, allowed: 1 to 64"),
        ({"port": 70_000}, "port: found 70000, allowed: 0 to 65535, 0 for any free one"),
        ({"policy": "Best"}, "policy: found 'Best', allowed: RoundRobin, LeastLoaded"),
        ({"health": {"interval": 1}}, "health.interval: unknown field; allowed here: interval_"),
        ({"health": {"jitter": 2}}, "health.jitter: found 2.0, allowed: 0 to 1"),
        ({"queue": {"max_in_flight": 0}}, "queue.max_in_flight: found 0, allowed: at least 1"),
        ({"limits": {"max_body": "much"}}, "limits.max_body: found 'much', allowed: a size"),
        ({"limits": {"drain_seconds": 0}}, "limits.drain_seconds: found 0.0, allowed: above 0"),
        ({"affinity": {"mode": "firm"}}, "affinity.mode: found 'firm'"),
        ({"affinity": {"ttl_seconds": 0}}, "affinity.ttl_seconds: found 0.0, allowed: above 0"),
        (
            {"balanced": {"assumed_tokens_per_second": 0}},
            "balanced.assumed_tokens_per_second: found 0.0, allowed: above 0",
        ),
        (
            {"balanced": {"work_weight": float("inf")}},
            "balanced.work_weight: found inf, allowed: a finite number from 0 on",
        ),
        ({"balanced": {"evenness": -1}}, "balanced.evenness: found -1.0, allowed: a finite number"),
        ({"instances": [{"name": "a"}]}, "instances[0]: found {'name': …}; object missing"),
        ({"instances": [{"url": URL, "x": 1}]}, "instances[0].x: unknown field; allowed here: url"),
        ({"instances": [{"url": "a:1"}]}, "instances[0].url: found 'a:1', allowed: http://HOST"),
        ({"instances": [{"url": URL, "name": "a/b"}]}, "instances[0].name: found 'a/b'"),
        ({"instances": [{"url": URL}] * 2}, "instances[1].name: found '127.0.0.1:8001'"),
        ({"instances": [{"url": URL, "events": "a"}]}, "instances[0].events: found 'a', allowed"),
        (
            {"instances": [{"url": URL, "events": "tcp://a:1", "vllm_events": "auto"}]},
            "instances[0].vllm_events: found 'auto', allowed: nothing",
        ),
        (
            {"instances": [{"url": URL, "vllm_events": {"endpint": "a"}}]},
            "instances[0].vllm_events.endpint: unknown field; allowed here: endpoint",
        ),
        ({"security": {"tls_key": "k"}}, "security.tls_certificate: found None, allowed: a file"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        router_config(given)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        router_config({"instances": [{"url": "http://me:secret@host:1"}]})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "a: [", ""])
def test_a_file_that_holds_no_mapping_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"router\.yaml"):
        load_router_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_router_config(tmp_path / "absent")


def test_loopback_is_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "", "localhost.evil")))
