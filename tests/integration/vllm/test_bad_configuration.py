"""A mistake in the configuration is told in one sentence, before any model is loaded."""

import json
from pathlib import Path

import pytest
from engine_process import opal
from live_server import kill_group, start_server

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

START_SECONDS_MAX = 120.0


@pytest.mark.parametrize("has_module_path", [False, True])
def test_server_ends_with_one_sentence(tmp_path: Path, has_module_path: bool) -> None:
    """Found by the short name as by the module path, in the dictionary as in a file."""
    config = opal({"CPUMemory": {"capacity_GB": "much"}})
    expected = (
        "CPUMemory.capacity_GB: found 'much', "
        "allowed: GiB as a positive number, or a size such as '512MiB'"
    )
    if has_module_path:
        path = tmp_path / "opal.json"
        path.write_text(json.dumps({"chunk_size": 256, "kvc_tears": ["CPUMemory"]}))
        config["kv_connector_extra_config"] = {"opal_config": str(path)}
        expected = "kvc_tears: unknown field; allowed here: "
    else:
        del config["kv_connector_module_path"]

    server = start_server(tmp_path, transfer_config=config)
    try:
        code = server.process.wait(START_SECONDS_MAX)
    finally:
        kill_group(server.process)

    log = server.log_text()
    assert code != 0
    assert log.count(expected) == 1
    assert "Initializing a V1 LLM engine" not in log  # no process that would load a model
    # It stands at the end, where one looks.
    assert expected in "".join(log.splitlines(keepends=True)[-4:])
