"""Real servers for a router: two with Opal, one without, all of the same tiny model."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq.auth
from live_server import Server, _wait_until_healthy, kill_group, start_server
from router_world import QUICK
from safetensors.numpy import save_file

from opal_connector.cli.models import ensure_tiny_llama
from opal_connector.cli.server_process import free_port, opal_transfer_config

ADAPTER = "poet"
# Engines that compute on the cores of the test answer late, and none of these dies.
PATIENT: dict[str, Any] = {
    **QUICK,
    "health": {**QUICK["health"], "timeout_seconds": 20.0, "dead_after_seconds": 20.0},
}
_RANK = 8
_HIDDEN = 64
# A model that speaks nonsense would go on with spaces for ever.
_STRUCTURED = {"backend": "xgrammar", "disable_any_whitespace": True}
# Everything that a template may be given leaves its mark.
_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% if documents %}{{ documents | tojson }}\n{% endif %}"
    "{% if reasoning_effort %}effort: {{ reasoning_effort }}\n{% endif %}"
    "{% if enable_thinking %}think\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class RouterEngine(msgspec.Struct):
    """A server, what a router is told about it, and the directory of a tokenizer that agrees."""

    server: Server
    config: dict[str, Any]
    model: Path

    @property
    def name(self) -> str:
        return str(self.config["name"])


@contextlib.contextmanager
def router_engines(root: Path) -> Iterator[dict[str, RouterEngine]]:
    """Two with Opal and its channel, `plain` with vLLM's own events; all healthy.

    The channel of `two` is encrypted, and asks who follows it.
    """
    model, adapter = _write_model(root / "model"), _write_adapter(root / "adapter")
    engines: dict[str, RouterEngine] = {}
    with contextlib.ExitStack() as stack:
        for name in ("one", "two"):
            events = f"tcp://127.0.0.1:{free_port(2)}"
            extra = {
                "kvc_tiers": ["CPUMemory"],
                "CPUMemory": {"capacity_GB": "256MiB"},
                "instance_id": name,
                "events": {"endpoint": events, "heartbeat_seconds": 0.2},
            }
            shown = {}
            if name == "two":
                extra["events"] |= {"curve": _keys(root)}  # type: ignore[operator]
                own, server = root / "router.key_secret", root / "engine.key"
                shown = {"server_key_file": str(server), "secret_key_file": str(own)}
            transfer = opal_transfer_config(extra)
            engine = _start(stack, model, adapter, name, [], transfer, events=events)
            engine.config |= {"events_curve": shown} if shown else {}
            engines[name] = engine
        port = free_port(2)
        published = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{port + 1}",
        }
        arguments = ["--kv-events-config", json.dumps(published)]
        engines["plain"] = _start(stack, model, adapter, "plain", arguments, vllm_events="auto")
        for engine in engines.values():
            _wait_until_healthy(engine.server)
        yield engines


def _start(
    stack: contextlib.ExitStack,
    model: Path,
    adapter: Path,
    name: str,
    arguments: list[str],
    transfer: dict[str, Any] | None = None,
    **events: str,
) -> RouterEngine:
    directory = model.with_name(name)
    directory.mkdir()
    server = start_server(
        directory,
        *("--model", str(model)),
        *("--enable-lora", "--max-lora-rank", str(_RANK), "--lora-modules", f"{ADAPTER}={adapter}"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--structured-outputs-config", json.dumps(_STRUCTURED)),
        *arguments,
        transfer_config=transfer,
    )
    stack.callback(kill_group, server.process)
    stack.callback(server.http.close)
    url = str(server.http.base_url).rstrip("/")
    return RouterEngine(server, {"url": url, "name": name, **events}, model)


def _keys(root: Path) -> dict[str, Any]:
    for name in ("engine", "router"):
        zmq.auth.create_certificates(root, name)
    secret, client = root / "engine.key_secret", root / "router.key"
    return {"secret_key_file": str(secret), "client_key_files": [str(client)]}


def _write_model(directory: Path) -> Path:
    """The tiny model with a chat template that knows tools."""
    shutil.copytree(ensure_tiny_llama(), directory)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "chat_template": _TEMPLATE}))
    return directory


def _write_adapter(directory: Path) -> Path:
    """A LoRA adapter that changes what the model says."""
    directory.mkdir()
    generator = np.random.default_rng(5)
    tensors = {}
    for layer in range(2):
        for module in ("q_proj", "v_proj"):
            place = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for half, shape in (("A", (_RANK, _HIDDEN)), ("B", (_HIDDEN, _RANK))):
                values = generator.standard_normal(shape).astype(np.float32) * np.float32(0.3)
                tensors[f"{place}.lora_{half}.weight"] = values
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "model",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
