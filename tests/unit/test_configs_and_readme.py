"""What users copy works: every file in configs/, and every configuration in the README."""

import json
import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
import yaml
from deploy_files import commands, documents, inner_files, transfer_configs

from opal_connector.cli.main import opal
from opal_connector.cli.serving.load import serve_config
from opal_connector.cluster.router.config import RouterConfig, router_config
from opal_connector.config import (
    TIER_NAMES,
    EngineTierConfig,
    FileTierConfig,
    KeyedTierConfig,
    OpalConfig,
    TierConfig,
    load_config,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path for path in (ROOT / "configs").iterdir() if path.is_file())
DEPLOYED = sorted(path for path in (ROOT / "configs" / "deploy").rglob("*") if path.is_file())
README = (ROOT / "README.md").read_text()
# In a shell line the JSON stands in single quotes; elsewhere in a fenced block.
IN_SHELL = re.compile(r"--kv-transfer-config '([^']*)'")
IN_FENCE = re.compile(r"```json\n(.*?)```", re.DOTALL)


def test_there_are_configs() -> None:
    """The parametrized tests below have something to test."""
    assert {path.name for path in CONFIGS} >= {"cpu-memory.json", "opal.yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_file_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .json file is a whole --kv-transfer-config, a .yaml file what `opal_config` names.

    One that begins with a model is for `opal serve`, once that model is there.
    """
    if path.suffix == ".json":
        check_transfer_config(json.loads(path.read_text()))
    elif "model" in (given := yaml.safe_load(path.read_text())):
        monkeypatch.chdir(tmp_path)
        (tmp_path / given["model"]).mkdir()
        assert len(serve_config(given).instances) > 1
    else:
        assert path.suffix == ".yaml", "say in this test what files of this kind are"
        load_config({"opal_config": str(path)})


def test_there_are_deployments() -> None:
    """The parametrized tests below have something to test, and read all kinds of files."""
    names = {path.name for path in DEPLOYED}
    kinds = {path.suffix for path in DEPLOYED}

    assert {"compose-valkey.yaml", "compose-s3.yaml", "compose-mooncake.yaml"} <= names
    assert kinds == {".yaml", ".service", ".env"}, "say in these tests what other kinds are"


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_deployment_says_first_what_it_is(path: Path) -> None:
    """Whoever opens an example reads what it is for before anything else."""
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_deployment_has_opal_configurations_that_load(path: Path, tmp_path: Path) -> None:
    """Opal's and the router's configurations in an example are taken as they stand there."""
    inner = {name: deployed_config(name, given) for name, given in inner_files(path).items()}
    for transfer in transfer_configs(path):
        extra = transfer["kv_connector_extra_config"]
        name = Path(extra["opal_config"]).name
        assert isinstance(inner[name], OpalConfig)
        (tmp_path / name).write_text(yaml.safe_dump(inner_files(path)[name]))
        check_transfer_config(
            transfer | {"kv_connector_extra_config": extra | {"opal_config": str(tmp_path / name)}}
        )
    if path.parent.name == "systemd" and path.suffix == ".yaml":
        deployed_config(path.name, documents(path)[0])
    if "compose" in path.name or "kubernetes" in path.name:
        kinds = {type(config) for config in inner.values()}
        assert kinds == {OpalConfig, RouterConfig}
        assert transfer_configs(path)


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_deployment_reaches_engines_where_they_are(path: Path) -> None:
    """A router's instances are services or pods of the same file, at the port of their events."""
    inner = inner_files(path)
    if "router.yaml" not in inner:
        return
    hosts = {name for document in documents(path) for name in (document.get("services") or {})}
    hosts |= {
        f"{name}-{number}.{document['spec']['serviceName']}"
        for document in documents(path)
        if document.get("kind") == "StatefulSet"
        for name in [document["metadata"]["name"]]
        for number in range(document["spec"]["replicas"])
    }
    port = inner["opal.yaml"]["events"]["endpoint"].rpartition(":")[2]

    for instance in router_config(inner["router.yaml"]).instances:
        assert instance.address.host in hosts
        assert instance.channels == (f"tcp://{instance.address.host}:{port}",)


@pytest.mark.parametrize("path", DEPLOYED, ids=lambda path: path.name)
def test_deployment_commands_have_options_that_exist(path: Path) -> None:
    """Every `opal` command in an example is one that this version takes."""
    ours = [words for words in commands(path) if Path(words[0]).name == "opal"]

    for words in ours:
        parse_opal(words[1:])

    is_ours = path.suffix == ".service" or "compose" in path.name or "kubernetes" in path.name
    assert bool(ours) == is_ours


@pytest.mark.vllm
def test_deployment_flags_of_vllm_exist() -> None:
    """Every `vllm serve` in an example is one that vLLM's own parser takes."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    found = [words for path in DEPLOYED for words in commands(path) if words[:1] == ["vllm"]]

    for words in found:
        assert words[1] == "serve"
        parsed = parser.parse_args(words[2:])
        assert parsed.kv_transfer_config.kv_connector == "OpalConnector"

    assert len(found) >= 4


def test_deployments_have_no_secrets() -> None:
    """Keys and passwords come from the environment or from a secret; examples have none."""
    for path in DEPLOYED:
        values = re.findall(
            r"(?m)^[^#\n]*(?<!\$\{)\b(\w*(?:_KEY|PASSWORD|SECRET\w*|TOKEN))[=:][ ]*(\S+)",
            path.read_text(),
        )
        assert all(value.startswith("${") for _, value in values), (path.name, values)


def test_yaml_shows_every_field_with_its_default() -> None:
    """Nobody has to look for a field elsewhere, and a changed default is changed there too."""
    shown = yaml.safe_load((ROOT / "configs" / "opal.yaml").read_text())

    assert shown == json.loads(msgspec.json.encode(OpalConfig()))
    assert load_config({"opal_config": str(ROOT / "configs" / "opal.yaml")}) == OpalConfig()


def test_readme_configurations_load() -> None:
    """Every configuration in the README is one that vLLM and Opal take."""
    texts = IN_SHELL.findall(README) + IN_FENCE.findall(README)

    configs = [json.loads(text) for text in texts]
    transfer_configs = [config for config in configs if "kv_connector" in config]
    for config in transfer_configs:
        check_transfer_config(config)
    for config in configs:
        if config not in transfer_configs:
            load_config(config)

    # A configuration written in a way that this test does not find would go unchecked.
    assert len(transfer_configs) == README.count('"kv_connector"') >= 1


def test_readme_table_names_every_field() -> None:
    """The table of the configuration is complete, and has no field that is not there."""
    rows = set(re.findall(r"^\| `([\w.<> ]+)` \|", README, re.MULTILINE))
    fields = {name for name in OpalConfig.__struct_fields__ if name not in TIER_NAMES}
    fields |= {f"<tier>.{name}" for name in TierConfig.__struct_fields__}
    below: tuple[tuple[str, type[TierConfig], type[TierConfig]], ...] = (
        ("<lower tier>", KeyedTierConfig, TierConfig),
        ("<file tier>", FileTierConfig, KeyedTierConfig),
        ("<store>", EngineTierConfig, KeyedTierConfig),
    )
    for label, kind, parent in below:
        own = set(kind.__struct_fields__) - set(parent.__struct_fields__)
        fields |= {f"{label}.{name}" for name in own}
    for tier in TIER_NAMES:
        settings = OpalConfig().tier(tier)
        kinds = (FileTierConfig, EngineTierConfig, TierConfig)
        kind = next(kind for kind in kinds if isinstance(settings, kind))
        own = set(settings.__struct_fields__) - set(kind.__struct_fields__)
        fields |= {f"{tier}.{name}" for name in own}

    assert rows == fields | {"opal_config"}


def check_transfer_config(config: dict[str, Any]) -> None:
    """It names our connector in one of the two ways, and its extra part is Opal's."""
    assert config["kv_connector"] == "OpalConnector"
    assert config.get("kv_connector_module_path", "opal_connector") == "opal_connector"
    assert config["kv_role"] in {"kv_both", "kv_producer", "kv_consumer"}
    assert config["kv_load_failure_policy"] == "recompute"
    load_config(config.get("kv_connector_extra_config"))


def deployed_config(name: str, given: dict[str, Any]) -> Any:
    """The checked configuration of a file that is called `opal.yaml`, `router.yaml`, ..."""
    match name:
        case "opal.yaml":
            return load_config(given)
        case "router.yaml":
            return router_config(given)
        case "serve.yaml":
            return serve_config(given)
    raise AssertionError(f"say in this test what {name} is")


def parse_opal(words: list[str]) -> None:
    """Have click parse a command of `opal`; nothing is run."""
    command: click.Command = opal
    context = click.Context(opal, info_name="opal")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=name)
    command.make_context(context.info_name, words, parent=context.parent)
