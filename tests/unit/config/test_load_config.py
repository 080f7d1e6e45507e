"""The configuration: what a user may write, and the one sentence that answers a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from opal_connector.config import (
    TIER_NAMES,
    ConfigError,
    CPUMemoryConfig,
    EventsConfig,
    OpalConfig,
    TierConfig,
    load_config,
    parse_endpoint,
)

NAN, INF = float("nan"), float("inf")
GIB = "GiB as a positive number, or a size such as '512MiB'"


def message(extra: Any) -> str:
    """The error that a configuration is answered with."""
    with pytest.raises(ConfigError) as caught:
        load_config(extra)
    text = str(caught.value)
    assert "\n" not in text
    return text


# Mistakes: where, what was found, what is allowed.

MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    # kvc_tiers
    ({"kvc_tiers": ["NVMe"]}, "kvc_tiers[0]", "'NVMe'", "CPUMemory"),
    ({"kvc_tiers": ["CPUMemory", "x"]}, "kvc_tiers[1]", "'x'", "CPUMemory"),
    ({"kvc_tiers": ["CPUMemory"] * 2}, "kvc_tiers", "['CPUMemory', 'CPUMemory']", "once"),
    ({"kvc_tiers": "CPUMemory"}, "kvc_tiers", "'CPUMemory'", "array"),
    ({"kvc_tiers": None}, "kvc_tiers", "None", "array"),
    ({"kvc_tiers": [17]}, "kvc_tiers[0]", "17", "str"),
    ({"kvc_tiers": ["CPUMemory", None]}, "kvc_tiers[1]", "None", "str"),
    # chunk_size
    ({"chunk_size": 0}, "chunk_size", "0", "a number of tokens or 'auto'"),
    ({"chunk_size": -16}, "chunk_size", "-16", "a number of tokens or 'auto'"),
    ({"chunk_size": "large"}, "chunk_size", "'large'", "a number of tokens or 'auto'"),
    ({"chunk_size": "256"}, "chunk_size", "'256'", "a number of tokens or 'auto'"),
    ({"chunk_size": 2.5}, "chunk_size", "2.5", "int | str"),
    ({"chunk_size": True}, "chunk_size", "True", "int | str"),
    # switches and numbers
    ({"save_unfull_chunk": 1}, "save_unfull_chunk", "1", "bool"),
    ({"save_unfull_chunk": "yes"}, "save_unfull_chunk", "'yes'", "bool"),
    ({"max_kvc_ready_requests": 0}, "max_kvc_ready_requests", "0", "at least 1"),
    ({"max_kvc_ready_requests": "3"}, "max_kvc_ready_requests", "'3'", "int"),
    ({"kvcevent_coalesce_time": -1}, "kvcevent_coalesce_time", "-1", "0 to 60 seconds"),
    ({"kvcevent_coalesce_time": 61}, "kvcevent_coalesce_time", "61", "0 to 60 seconds"),
    ({"kvcevent_coalesce_time": NAN}, "kvcevent_coalesce_time", "nan", "0 to 60 seconds"),
    # the event channel
    ({"instance_id": ""}, "instance_id", "''", "1 to 128 characters"),
    ({"instance_id": "x" * 129}, "instance_id", "'xxx", "1 to 128 characters"),
    ({"instance_id": 7}, "instance_id", "7", "str"),
    ({"events": 5601}, "events", "5601", "object"),
    ({"events": {"endpoint": 5601}}, "events.endpoint", "5601", "str"),
    ({"events": {"endpoint": "localhost"}}, "events.endpoint", "'localhost'", "tcp://HOST:PORT"),
    ({"events": {"endpoint": "ipc:///x"}}, "events.endpoint", "'ipc:///x'", "tcp://HOST:PORT"),
    ({"events": {"endpoint": "tcp://*:x"}}, "events.endpoint", "'tcp://*:x'", "tcp://HOST:PORT"),
    (
        {"events": {"endpoint": "tcp://h:70000"}},
        "events.endpoint",
        "'tcp://h:70000'",
        "tcp://HOST:PORT",
    ),
    ({"events": {"endpoint": "tcp://::1:5"}}, "events.endpoint", "'tcp://::1:5'", "HOST:PORT"),
    ({"events": {"publish_endpoint": ""}}, "events.publish_endpoint", "''", "tcp://HOST:PORT"),
    ({"events": {"heartbeat_seconds": 0}}, "events.heartbeat_seconds", "0", "0.1 to 60"),
    ({"events": {"heartbeat_seconds": NAN}}, "events.heartbeat_seconds", "nan", "0.1 to 60"),
    ({"events": {"replay_size": "many"}}, "events.replay_size", "'many'", GIB),
    ({"weights_id": ""}, "weights_id", "''", "any other text"),
    ({"weights_id": 5}, "weights_id", "5", "str"),
    # a tier
    ({"CPUMemory": 8}, "CPUMemory", "8", "object"),
    ({"CPUMemory": {"capacity_GB": 0}}, "CPUMemory.capacity_GB", "0", GIB),
    ({"CPUMemory": {"capacity_GB": -1}}, "CPUMemory.capacity_GB", "-1", GIB),
    ({"CPUMemory": {"capacity_GB": NAN}}, "CPUMemory.capacity_GB", "nan", GIB),
    ({"CPUMemory": {"capacity_GB": INF}}, "CPUMemory.capacity_GB", "inf", GIB),
    ({"CPUMemory": {"capacity_GB": "8 XB"}}, "CPUMemory.capacity_GB", "'8 XB'", GIB),
    ({"CPUMemory": {"capacity_GB": "-8 GB"}}, "CPUMemory.capacity_GB", "'-8 GB'", GIB),
    ({"CPUMemory": {"capacity_GB": ""}}, "CPUMemory.capacity_GB", "''", GIB),
    ({"CPUMemory": {"capacity_GB": [1]}}, "CPUMemory.capacity_GB", "[1]", "float | str"),
    ({"CPUMemory": {"eviction_policy": "MRU"}}, "CPUMemory.eviction_policy", "'MRU'", "LRU"),
    ({"CPUMemory": {"eviction_policy": 3}}, "CPUMemory.eviction_policy", "3", "LRU"),
    ({"CPUMemory": {"eviction_threshold": 0}}, "CPUMemory.eviction_threshold", "0", "above 0"),
    ({"CPUMemory": {"eviction_threshold": 2}}, "CPUMemory.eviction_threshold", "2", "at most 1"),
    ({"CPUMemory": {"eviction_threshold": NAN}}, "CPUMemory.eviction_threshold", "nan", "above 0"),
    ({"quotas": {"a": 0}}, "quotas.a", "0", "at most 1"),
    ({"quotas": {"a": 1.5}}, "quotas.a", "1.5", "at most 1"),
    ({"CPUMemory": {"eviction_target": 0}}, "CPUMemory.eviction_target", "0", "above 0"),
    (
        {"CPUMemory": {"eviction_threshold": 0.5, "eviction_target": 0.6}},
        "CPUMemory.eviction_target",
        "0.6",
        "at most eviction_threshold (0.5)",
    ),
    ({"CPUMemory": {"ttl_seconds": 0}}, "CPUMemory.ttl_seconds", "0", "above 0"),
    ({"CPUMemory": {"ttl_seconds": NAN}}, "CPUMemory.ttl_seconds", "nan", "above 0"),
    ({"kvc_tiers": ["LocalNVMe"]}, "LocalNVMe.path", "None", "the path of a directory"),
    ({"LocalNVMe": {"write": "back"}}, "LocalNVMe.write", "'back'", "through, demote, off"),
    ({"LocalNVMe": {"admission": ""}}, "LocalNVMe.admission", "''", "adaptive, always"),
    ({"LocalNVMe": {"reserve_GB": -1}}, "LocalNVMe.reserve_GB", "-1", GIB),
    ({"LocalNVMe": {"timeout_seconds": 0}}, "LocalNVMe.timeout_seconds", "0", "0.1 to 600"),
    (
        {"DistributedFS": {"lookup_timeout_seconds": 60}},
        "DistributedFS.lookup_timeout_seconds",
        "60",
        "0 to 5",
    ),
    (
        {"DistributedFS": {"refresh_seconds": 0}},
        "DistributedFS.refresh_seconds",
        "0",
        "0.1 to 3600",
    ),
    ({"CPUMemory": {"concurrency": 0}}, "CPUMemory.concurrency", "0", "1 to 64"),
    ({"CPUMemory": {"concurrency": 65}}, "CPUMemory.concurrency", "65", "1 to 64"),
    ({"CPUMemory": {"concurrency": 1.5}}, "CPUMemory.concurrency", "1.5", "int"),
    # keys that are no text
    ({"CPUMemory": {1: 2}}, "CPUMemory", "1", "text"),
    ({1: 2}, "kv_connector_extra_config", "1", "text"),
]


@pytest.mark.parametrize(("extra", "path", "found", "allowed"), MISTAKES)
def test_mistake_is_answered_with_path_found_and_allowed(
    extra: dict[str, Any], path: str, found: str, allowed: str
) -> None:
    """One sentence says where the mistake is, what stands there, and what may stand there."""
    text = message(extra)

    assert text.startswith(f"{path}: found {found}")
    assert allowed in text.removeprefix(f"{path}: found {found}")


def test_unknown_field_lists_the_fields_there_are() -> None:
    """A misspelt name is not silently the default, and the right one is in the message."""
    assert message({"chunk_sise": 128}) == (
        "chunk_sise: unknown field; allowed here: kvc_tiers, chunk_size, save_unfull_chunk, "
        "max_kvc_ready_requests, kvcevent_coalesce_time, instance_id, events, weights_id, "
        "quotas, CPUMemory, LocalNVMe, DistributedFS, ObjectStore, Mooncake, Valkey"
    )
    assert message({"CPUMemory": {"capacity": 1}}) == (
        "CPUMemory.capacity: unknown field; allowed here: capacity_GB, eviction_policy, "
        "eviction_threshold, eviction_target, ttl_seconds, concurrency"
    )


def test_an_unknown_field_of_the_channel_lists_its_fields() -> None:
    assert message({"events": {"port": 1}}) == (
        "events.port: unknown field; allowed here: endpoint, publish_endpoint, "
        "heartbeat_seconds, replay_size, curve"
    )


def test_the_channel_is_off_unless_it_is_asked_for() -> None:
    assert load_config({}).events is None
    config = load_config({"events": {}, "instance_id": "a"})
    assert config.events == EventsConfig(endpoint="tcp://127.0.0.1:5601")
    assert config.instance_id == "a"


@pytest.mark.parametrize(
    ("text", "address", "announced", "following"),
    [
        ("tcp://127.0.0.1:5601", "tcp://127.0.0.1:5601", "tcp://127.0.0.1:5601", 5_603),
        ("tcp://*:5601", "tcp://*:5601", "tcp://*:5601", 5_603),
        ("tcp://0.0.0.0:7", "tcp://0.0.0.0:7", "tcp://*:7", 9),
        ("tcp://[::1]:7", "tcp://[::1]:7", "tcp://[::1]:7", 9),
        ("tcp://node:*", "tcp://node:*", "tcp://node:0", 0),
        ("tcp://node:0", "tcp://node:*", "tcp://node:0", 0),
    ],
)
def test_an_endpoint_is_bound_announced_and_shifted(
    text: str, address: str, announced: str, following: int
) -> None:
    endpoint = parse_endpoint(text)
    assert (endpoint.address, endpoint.announced) == (address, announced)
    assert endpoint.next_to(2).port == following


def test_unknown_tier_object_is_an_unknown_field() -> None:
    """Settings for a tier that does not exist are not ignored."""
    assert message({"TapeRobot": {"capacity_GB": 8}}).startswith("TapeRobot: unknown field")


# What is right.


@pytest.mark.parametrize("extra", [None, {}])
def test_nothing_is_the_default(extra: dict[str, Any] | None) -> None:
    """Opal works without a word of configuration."""
    assert load_config(extra) == OpalConfig()
    assert OpalConfig().kvc_tiers == ("CPUMemory",)
    assert (OpalConfig().chunk_size, OpalConfig().save_unfull_chunk) == (256, True)


def test_everything_can_be_said() -> None:
    """Every field of the README's table is accepted under its own name."""
    config = load_config(
        {
            "kvc_tiers": ["CPUMemory"],
            "chunk_size": "auto",
            "save_unfull_chunk": False,
            "max_kvc_ready_requests": 3,
            "kvcevent_coalesce_time": 1,
            "weights_id": "mine",
            "CPUMemory": {
                "capacity_GB": "512MiB",
                "eviction_policy": "LRU",
                "eviction_threshold": 0.9,
                "concurrency": 1,
            },
        }
    )

    assert config == OpalConfig(
        kvc_tiers=("CPUMemory",),
        chunk_size="auto",
        save_unfull_chunk=False,
        max_kvc_ready_requests=3,
        kvcevent_coalesce_time=1.0,
        weights_id="mine",
        CPUMemory=CPUMemoryConfig(
            capacity_GB="512MiB", eviction_policy="LRU", eviction_threshold=0.9, concurrency=1
        ),
    )


def test_field_of_the_host_is_not_ours() -> None:
    """VLLM itself reads kv_connector_module_path from the same dictionary."""
    assert load_config({"kv_connector_module_path": "opal_connector"}) == OpalConfig()


WHERE: dict[str, dict[str, str]] = {
    "LocalNVMe": {"path": "/tmp/opal"},
    "DistributedFS": {"path": "/tmp/opal"},
    "ObjectStore": {"url": "s3://bucket/prefix"},
    "Mooncake": {"master": "host:50051", "metadata": "http://host:8080/metadata"},
    "Valkey": {"url": "redis://host:6379/0"},
}


@pytest.mark.parametrize("name", TIER_NAMES)
def test_every_tier_has_an_object_under_its_own_name(name: str) -> None:
    """A tier that can be named in kvc_tiers can be configured."""
    where = WHERE.get(name, {})
    config = load_config({"kvc_tiers": [name], name: {"concurrency": 7, **where}})

    assert isinstance(config.tier(name), TierConfig)
    assert config.tier(name).concurrency == 7


def test_no_tier_is_allowed() -> None:
    """An empty hierarchy switches Opal off without another change to the command line."""
    assert load_config({"kvc_tiers": []}).kvc_tiers == ()


# The file.

FILE = {"chunk_size": 128, "CPUMemory": {"capacity_GB": 4, "concurrency": 7}}
YAML = "chunk_size: 128\nCPUMemory:\n  capacity_GB: 4\n  concurrency: 7\n"


@pytest.mark.parametrize("text", [json.dumps(FILE), YAML], ids=["json", "yaml"])
def test_file_is_read(tmp_path: Path, text: str) -> None:
    """JSON or YAML, the same words as in the dictionary."""
    (tmp_path / "opal").write_text(text)

    config = load_config({"opal_config": str(tmp_path / "opal")})

    assert config.chunk_size == 128
    assert config.CPUMemory == CPUMemoryConfig(capacity_GB=4.0, concurrency=7)


def test_dictionary_wins_over_the_file(tmp_path: Path) -> None:
    """One value can be changed on the command line; all others of the file stay."""
    (tmp_path / "opal").write_text(YAML)

    config = load_config(
        {
            "opal_config": str(tmp_path / "opal"),
            "chunk_size": 64,
            "CPUMemory": {"capacity_GB": 1},
        }
    )

    assert config.chunk_size == 64
    assert config.CPUMemory == CPUMemoryConfig(capacity_GB=1.0, concurrency=7)


def test_home_in_the_name_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands what stands inside JSON."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "opal.yaml").write_text(YAML)

    assert load_config({"opal_config": "~/opal.yaml"}).chunk_size == 128


def test_mistake_in_the_file_is_answered_like_one_in_the_dictionary(tmp_path: Path) -> None:
    """The same sentence, with what really stands in the file."""
    (tmp_path / "opal").write_text("CPUMemory:\n  concurrency: many\n")

    text = message({"opal_config": str(tmp_path / "opal")})

    assert text.startswith("CPUMemory.concurrency: found 'many'")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[1, 2]", "no mapping"),
        (b"", "no mapping"),
        (b"{a: [", "neither JSON nor YAML"),
        (b"\xff\xfe\xff", "neither JSON nor YAML"),
        (b"a: \x00", "neither JSON nor YAML"),
        (b"opal_config: other.yaml", "one file is allowed"),
        (b"!!python/object/apply:os.getpid []", "neither JSON nor YAML"),
    ],
)
def test_file_that_is_none_gets_one_sentence(tmp_path: Path, content: bytes, reason: str) -> None:
    """A file that holds something else is named, with the reason; nothing in it is executed."""
    (tmp_path / "opal").write_bytes(content)

    text = message({"opal_config": str(tmp_path / "opal")})

    assert text.startswith(f"opal_config: '{tmp_path / 'opal'}'")
    assert reason in text


@pytest.mark.parametrize("name", [5, ["a"], "a\0b", "~nobody-here/opal.yaml"])
def test_name_that_is_no_path_gets_one_sentence(name: object) -> None:
    """What cannot be a path is answered like any other mistake."""
    assert message({"opal_config": name}).startswith(f"opal_config: found {name!r}")


def test_absent_file_gets_one_sentence(tmp_path: Path) -> None:
    """The file, and what the system said."""
    name = str(tmp_path / "absent")

    assert message({"opal_config": name}) == (
        f"opal_config: found '{name}', which cannot be read (No such file or directory)"
    )


def test_directory_gets_one_sentence(tmp_path: Path) -> None:
    """A directory is a path, but no file."""
    assert "which cannot be read (Is a directory)" in message({"opal_config": str(tmp_path)})
