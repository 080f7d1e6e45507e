"""What users copy works: every file in configs/, and every configuration in the README."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from opal_connector.cli.serving.load import serve_config
from opal_connector.config import (
    TIER_NAMES,
    FileTierConfig,
    OpalConfig,
    TierConfig,
    load_config,
)

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").iterdir())
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
    own = set(FileTierConfig.__struct_fields__) - set(TierConfig.__struct_fields__)
    fields |= {f"<file tier>.{name}" for name in own}
    for tier in TIER_NAMES:
        settings = OpalConfig().tier(tier)
        kind = FileTierConfig if OpalConfig().file_tier(tier) is not None else TierConfig
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
