"""What a user may write about a cluster, what becomes of it, and the sentence about a mistake."""

import importlib.util
import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from serve_world import fake_cluster, given

from opal_connector.cli import model_store
from opal_connector.cli.serve import serve
from opal_connector.cli.serving.load import load_serve_config, serve_config
from opal_connector.cli.serving.plans import InstancePlan, Planner
from opal_connector.config import ConfigError, load_config


def plans(
    directory: Path, environ: dict[str, str] | None = None, **changes: Any
) -> list[InstancePlan]:
    config = fake_cluster(directory, **changes)
    planner = Planner(config, environ or {})
    return [planner.plan(one, number) for number, one in enumerate(config.instances, 1)]


def transfer_of(plan: InstancePlan) -> dict[str, Any]:
    place = plan.command.index("--kv-transfer-config")
    found: dict[str, Any] = json.loads(plan.command[place + 1])
    return found


def flags_of(plan: InstancePlan) -> list[str]:
    """The command line after what serve itself says."""
    return list(plan.command[plan.command.index("--kv-transfer-config") + 2 :])


def channel(endpoint: str) -> dict[str, Any]:
    return {"tiers": {"events": {"endpoint": endpoint}}}


def test_instances_share_what_is_shared_and_nothing_else(tmp_path: Path) -> None:
    """Private directories and all ports are one instance's; the shared directory is everybody's."""
    one, two = plans(tmp_path)
    extras = [transfer_of(plan)["kv_connector_extra_config"] for plan in (one, two)]
    assert [extra["LocalNVMe"]["path"] for extra in extras] == [
        str(tmp_path / "engine-1"),
        str(tmp_path / "engine-2"),
    ]
    assert {extra["DistributedFS"]["path"] for extra in extras} == {str(tmp_path / "shared")}
    assert [extra["instance_id"] for extra in extras] == ["engine-1", "engine-2"]
    assert transfer_of(one)["kv_load_failure_policy"] == "recompute"
    ports = [one.url.rpartition(":")[2], two.url.rpartition(":")[2]]
    for extra in extras:
        load_config(extra)
        ports += [
            extra["events"][name].rpartition(":")[2] for name in ("endpoint", "publish_endpoint")
        ]
    assert len(set(ports)) == 6
    assert [plan.router.channels for plan in (one, two)] == [
        (extra["events"]["endpoint"],) for extra in extras
    ]


def test_lasting_ports_are_none_that_a_client_may_be_given(tmp_path: Path) -> None:
    """Who connects to an engine that is being started again must not reach himself."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for plan in plans(tmp_path, instances=5):
        for url in (plan.url, *plan.router.channels):
            assert int(url.rpartition(":")[2]) + 1 < low


def test_an_instance_that_comes_again_gives_back_its_ports(tmp_path: Path) -> None:
    """Else scaling would use all of them up, some day."""
    config = fake_cluster(tmp_path, instances=2)
    planner = Planner(config, {})
    urls = {planner.plan(config.instances[0], 1).url for _ in range(20)}
    planner.plan(config.instances[1], 2)
    assert len(urls) > 1
    assert sum(map(len, planner._given.values())) == 2 * 3


def test_settings_of_stores_are_in_a_file_of_their_owner(tmp_path: Path) -> None:
    """Everybody can read a command line, and vLLM logs it; an instance comes with the same file."""
    config = fake_cluster(
        tmp_path,
        tiers={
            "kvc_tiers": ["CPUMemory", "Valkey"],
            "Valkey": {"url": "redis://:hunter2@host", "prefix": "ours"},
            "ObjectStore": {"url": "s3://bucket", "options": {"aws_secret_access_key": "hunter2"}},
        },
    )
    planner = Planner(config, {})
    try:
        one, two = (planner.plan(each, place) for place, each in enumerate(config.instances, 1))
        extras = [transfer_of(plan)["kv_connector_extra_config"] for plan in (one, two)]
        for plan in (one, two):
            assert not any("hunter2" in word for word in plan.command)
        paths = [Path(extra["opal_config"]) for extra in extras]
        assert len(set(paths)) == 2
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert stat.S_IMODE(paths[0].parent.stat().st_mode) == 0o700
        loaded = load_config(extras[1])
        assert loaded.Valkey.url == "redis://:hunter2@host"
        assert loaded.Valkey.prefix == "ours"
        assert loaded.ObjectStore.options == {"aws_secret_access_key": "hunter2"}
        assert loaded.instance_id == "engine-2"
        again = transfer_of(planner.plan(config.instances[1], 2))["kv_connector_extra_config"]
        assert again["opal_config"] == str(paths[1])
    finally:
        planner.close()
    assert not paths[0].parent.exists()


def test_a_file_that_is_named_is_taken_into_it(tmp_path: Path) -> None:
    """One file is all that an engine can be given; what stands beside it wins, as ever."""
    named = tmp_path / "opal.yaml"
    named.write_text("chunk_size: 64\nValkey: {url: 'redis://host', prefix: ours}\n")
    tiers = {
        "opal_config": str(named),
        "kvc_tiers": ["CPUMemory", "Valkey"],
        "Valkey": {"url": "redis://:hunter2@host"},
    }
    config = fake_cluster(tmp_path, instances=1, tiers=tiers)
    planner = Planner(config, {})
    try:
        extra = transfer_of(planner.plan(config.instances[0], 1))["kv_connector_extra_config"]
        loaded = load_config(extra)
    finally:
        planner.close()
    assert (loaded.chunk_size, loaded.Valkey.prefix) == (64, "ours")
    assert loaded.Valkey.url == "redis://:hunter2@host"


def test_without_stores_there_is_no_file(tmp_path: Path) -> None:
    """What has no credentials can be seen on the command line."""
    for plan in plans(tmp_path):
        assert "opal_config" not in transfer_of(plan)["kv_connector_extra_config"]


def test_flags_are_words_of_a_command_line(tmp_path: Path) -> None:
    """True, false, null, lists, mappings and numbers, in any spelling of the flag's name."""
    vllm = {
        "block_size": 32,
        "--enforce-eager": True,
        "async-scheduling": False,
        "lora-modules": ["a=/x", "b=/y"],
        "speculative-config": {"method": "ngram"},
        "dtype": "float32",
        "enable-prompt-tokens-details": None,
        "disable-access-log-for-endpoints": None,
    }
    one, two = plans(tmp_path, vllm=vllm, instances=[{}, {"vllm": {"dtype": "auto"}}])
    common = ["--block-size", "32", "--enforce-eager", "--no-async-scheduling", "--lora-modules"]
    common += ["a=/x", "b=/y", "--speculative-config", '{"method": "ngram"}', "--dtype"]
    assert flags_of(one) == [*common, "float32"]
    assert flags_of(two) == [*common, "auto"]


def test_an_engine_is_vllms_server_unless_another_command_is_given(tmp_path: Path) -> None:
    """`vllm serve` does not start with the CPU package; who needs numactl or the like says so."""
    contents = given(tmp_path)
    del contents["command"]
    config = serve_config(contents)
    plan = Planner(config, {}).plan(config.instances[0], 1)
    assert plan.command[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    (bound,) = plans(tmp_path, instances=1, command=["numactl", "-N{index}", "{python}"])
    assert bound.command[:3] == ("numactl", "-N0", sys.executable)


def test_what_an_instance_has_of_its_own_wins_value_by_value(tmp_path: Path) -> None:
    """Names, ports, environment and tiers of one instance; the rest is as for all."""
    instances = [
        {"name": "left", "port": 8001, "environment": {"CUDA_VISIBLE_DEVICES": 0}},
        {"name": "right", "tiers": {"CPUMemory": {"capacity_GB": 2}, "chunk_size": 64}},
    ]
    environ = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "7"}
    left, right = plans(
        tmp_path, environ, instances=instances, environment={"A": "of {name}", "B": 1.5}
    )
    assert left.url == "http://127.0.0.1:8001"
    assert (left.environment["A"], left.environment["B"]) == ("of left", "1.5")
    assert left.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert right.environment["CUDA_VISIBLE_DEVICES"] == "7"
    assert right.environment["PATH"] == "/bin"
    extra = transfer_of(right)["kv_connector_extra_config"]
    assert (extra["CPUMemory"], extra["chunk_size"]) == ({"capacity_GB": 2}, 64)
    assert extra["LocalNVMe"] == {"path": str(tmp_path / "right")}
    assert "CPUMemory" not in transfer_of(left)["kv_connector_extra_config"]


def test_the_key_of_an_engine_comes_from_the_environment(tmp_path: Path) -> None:
    """It is never in the file nor on a command line that others see."""
    instances = [{"api_key_env": "ENGINE_KEY"}]
    (plan,) = plans(tmp_path, {"ENGINE_KEY": "secret"}, instances=instances)
    assert plan.environment["VLLM_API_KEY"] == "secret"
    assert plan.router.api_key_env == "ENGINE_KEY"
    assert not any("secret" in word for word in plan.command)
    with pytest.raises(ConfigError, match="api_key_env: found 'ENGINE_KEY', allowed"):
        plans(tmp_path, {}, instances=instances)


def test_each_rank_of_an_engine_has_a_channel(tmp_path: Path) -> None:
    """With data parallelism the router follows all of them, two ports apart."""
    (plan,) = plans(tmp_path, instances=1, vllm={"data-parallel-size": 3})
    ports = [int(one.rpartition(":")[2]) for one in plan.router.channels]
    assert ports == [ports[0], ports[0] + 2, ports[0] + 4]


def test_a_channel_for_all_addresses_is_followed_on_this_machine(tmp_path: Path) -> None:
    """Nobody can connect to an address that means all of them."""
    (plan,) = plans(tmp_path, instances=[channel("tcp://*:5601")])
    extra = transfer_of(plan)["kv_connector_extra_config"]
    assert extra["events"]["endpoint"] == "tcp://*:5601"
    assert plan.router.channels == ("tcp://127.0.0.1:5601",)


def test_engines_without_opal_are_known_by_their_load_alone(tmp_path: Path) -> None:
    (plan,) = plans(tmp_path, instances=1, tiers=None)
    assert "--kv-transfer-config" not in plan.command
    assert plan.router.channels == ()


def test_a_model_may_be_a_name_that_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served by that name, and what is not there yet can be had by one command."""
    monkeypatch.setenv("OPAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model: found 'smollm2-135m', .*opal models get smoll"):
        fake_cluster(tmp_path, model="smollm2-135m")
    recipe = model_store.ModelRecipe(
        name="tiny-llama-seed7",
        parameters={},
        revision=1,
        build=lambda directory, _: (directory / "config.json").write_text("{}"),
    )
    path = model_store.ensure_model(recipe, None, reporter=model_store.Reporter())
    (plan,) = plans(tmp_path, model="tiny-llama-seed7", instances=1)
    assert plan.command[plan.command.index("--model") + 1] == str(path)
    assert ("--served-model-name", "tiny-llama-seed7") in zip(
        plan.command, plan.command[1:], strict=False
    )
    assert fake_cluster(tmp_path, model="organisation/model").model_path == "organisation/model"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "no such thing"}, r"model: found 'no such thing', allowed: a directory"),
        ({"instances": []}, r"instances: found \[\], allowed: at least one"),
        ({"instances": [{"name": "a/b"}]}, r"instances\[0\].name: found 'a/b', allowed: 1 to 64"),
        ({"instances": [{"name": "a"}, {"name": "a"}]}, r"instances\[1\].name: found 'a', allowed"),
        ({"instances": [{"port": 1}, {"port": 1}]}, r"instances\[1\].port: found 1, allowed"),
        ({"instances": [{"ports": 1}]}, r"instances\[0\].ports: unknown field; allowed here: name"),
        ({"instances": 3, "scaling": {"max_workers": 2}}, r"instances: found 3, allowed: 1 to max"),
        ({"scaling": {"min_workers": 60}}, r"scaling.min_workers: found 60, allowed: at most max"),
        ({"scaling": {"max_queue_threshold": 0}}, r"max_queue_threshold: found 0.*above 0"),
        ({"scaling": {"scale_in_share": 1.5}}, r"scaling.scale_in_share: found 1.5, allowed: 0 to"),
        ({"scaling": {"scale_command": []}}, r"scaling.scale_command: found \(\), allowed: a pro"),
        ({"scaling": {"scale_command": " "}}, r"scaling.scale_command: found ' ', allowed: a pro"),
        ({"scaling": {"scale_command": "a 'b"}}, r"scaling.scale_command: found .*, allowed: a pr"),
        (
            {"router": {"port": 8000}, "instances": [{"port": 8000}]},
            r"instances\[0\].port: found 8000, allowed: a port that is not that of router.port",
        ),
        (
            {"instances": [channel("tcp://*:5601"), channel("tcp://127.0.0.1:5602")]},
            r"instances\[1\].tiers.events.endpoint: found 5602, allowed: a port that is not that "
            r"of instances\[0\].tiers.events.publish_endpoint",
        ),
        (
            {"instances": [channel("tcp://127.0.0.1:*")]},
            r"\[0\].tiers.events.endpoint: found 'tcp://127.0.0.1:\*', allowed: one with a port",
        ),
        (
            {"instances": [{"tiers": {"events": {"curve": {}}}}]},
            r"instances\[0\].tiers.events.curve: found \{\}, allowed: nothing, since this",
        ),
        (
            {"vllm": {"data-parallel-size": "two"}},
            r"data-parallel-size: found 'two', allowed: a num",
        ),
        ({"restart": {"jitter": 2}}, r"restart.jitter: found 2.0, allowed: 0 to 1"),
        ({"restart": {"limits": 2}}, r"restart.limits: unknown field; allowed here: first_seconds"),
        ({"logs": {"colour": "red"}}, r"logs.colour: found 'red'"),
        ({"vllm": {"host": "0.0.0.0"}}, r"vllm.host: found '0.0.0.0', allowed: nothing, since"),
        (
            {"vllm": {"kv_transfer_config": {}}},
            r"vllm.kv_transfer_config: found \{\}, allowed: not",
        ),
        ({"vllm": {"block-size": 1, "block_size": 2}}, r"vllm: found the flag 'block_size' twice"),
        ({"router": {"instances": []}}, r"router.instances: found 'a list', allowed: nothing"),
        ({"router": {"workers": 2}}, r"router.workers: found 2, allowed: 1, since this process"),
        ({"router": {"policy": "Best"}}, r"router.policy: found 'Best', allowed: RoundRobin"),
        ({"tiers": {"kvc_tiers": ["RAM"]}}, r"tiers.kvc_tiers\[0\]: found 'RAM', allowed: CPUMem"),
        ({"tiers": {"instance_id": "me"}}, r"tiers.instance_id: found 'me', allowed: nothing"),
        (
            {"tiers": {"events": {"endpoint": "tcp://127.0.0.1:5601"}}},
            r"tiers.events.endpoint: found 'tcp://127.0.0.1:5601', allowed: nothing, since each",
        ),
        (
            {"tiers": {"kvc_tiers": ["LocalNVMe"], "LocalNVMe": {"path": "/disk"}}},
            r"tiers.LocalNVMe.path: found '/disk', allowed: a directory for each instance, such as",
        ),
        (
            {"tiers": {"kvc_tiers": ["DistributedFS"], "DistributedFS": {"path": "/x/{name}"}}},
            r"tiers: found \['/x/engine-1', '/x/engine-2'\], allowed: one directory or store",
        ),
    ],
)
def test_a_mistake_names_the_field_and_what_is_allowed(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fake_cluster(tmp_path, **changes)


def test_a_store_that_the_environment_moves_is_another(tmp_path: Path) -> None:
    """Instances whose environments name other endpoints share nothing."""
    tiers = {"kvc_tiers": ["ObjectStore"], "ObjectStore": {"url": "s3://bucket/opal"}}
    moved = {"environment": {"AWS_ENDPOINT_URL": "http://minio:9000"}}
    fake_cluster(tmp_path, tiers=tiers, instances=[moved, moved])
    with pytest.raises(ConfigError, match=r"tiers: found .*, allowed: one directory or store"):
        fake_cluster(tmp_path, tiers=tiers, instances=[moved, {}])


def test_a_tier_without_its_library_is_told_by_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any engine is started; engines of another Python have libraries of their own."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, package=None: None if name == "hiredis" else find(name, package),
    )
    tiers = {"kvc_tiers": ["CPUMemory", "Valkey"], "Valkey": {"url": "redis://host"}}
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(given(tmp_path, tiers=tiers, command=["{python}", "-m", "engine"])))
    result = CliRunner().invoke(serve, ["--config", str(path), "--check"])
    assert result.exit_code == 2
    assert result.output == (
        "Error: tiers.Valkey: the Python package 'hiredis' is missing: "
        "pip install 'opal-connector[valkey]'.\n"
    )
    fake_cluster(tmp_path, tiers=tiers, command=["/opt/engines/bin/python", "-m", "engine"])


def test_a_mistake_does_not_repeat_a_secret(tmp_path: Path) -> None:
    """What stands in the wrong place may be what was meant to be kept."""
    extra = {"kv_connector_extra_config": {"Valkey": {"url": "redis://:hunter2@host"}}}
    for changes in (
        {"vllm": {"kv-transfer-config": extra}},
        {"environment": {"KEY": ["hunter2"]}},
        {"tiers": {"kvc_tiers": ["Valkey"], "Valkey": {"url": "http://:hunter2@host"}}},
        {"tiers": {"instance_id": "redis://:hunter2@host"}},
    ):
        with pytest.raises(ConfigError) as caught:
            fake_cluster(tmp_path, **changes)
        assert "hunter2" not in str(caught.value)


def test_an_instance_that_scaling_may_add_needs_a_directory_of_its_own_as_well(
    tmp_path: Path,
) -> None:
    """One instance may have any directory, until a second one can come."""
    tiers = {"kvc_tiers": ["LocalNVMe"], "LocalNVMe": {"path": "/disk"}}
    fake_cluster(tmp_path, instances=1, tiers=tiers)
    with pytest.raises(ConfigError, match=r"tiers.LocalNVMe.path: found '/disk', allowed: a dir"):
        fake_cluster(tmp_path, instances=1, tiers=tiers, scaling={"enable_scaling": True})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which cannot be read"):
        load_serve_config(tmp_path / "absent.yaml")
