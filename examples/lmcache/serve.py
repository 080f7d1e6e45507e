"""One command: vLLM on the CPU, LMCache's server beside it, and Opal's tiers under LMCache.

`serve.py` starts both, and Ctrl-C ends both. With `--autostart` vLLM starts LMCache's server
itself, `--only vllm --port 8001` is one more vLLM on the server that runs, and `--print` shows the
commands.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from opal_connector.cli.models import ensure_smollm2
from opal_connector.integrations.lmcache.segments import segments_removed

HOST = "127.0.0.1"
SERVED_MODEL = "model"
BLOCK_TOKENS = 32
CHUNK_TOKENS = 256  # a multiple of the block
STOP_SECONDS = 20.0
ENVIRONMENT = {
    # LMCache sends usage data to its makers unless this says no. Autostart inherits it.
    "LMCACHE_TRACK_USAGE": "false",
    # On a CPU the worker would choose the other mode, which the server does not offer by default.
    "LMCACHE_MP_TRANSFER_MODE": "lmcache_driven",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache: without it the device answers repeats
}


def adapter(options: argparse.Namespace) -> dict[str, Any]:
    """`--l2-adapter`: Opal's host memory over a directory."""
    return {
        "type": "plugin",
        "module_path": "opal_connector.integrations.lmcache.l2_adapter",
        "class_name": "OpalL2Adapter",
        "adapter_params": {
            "kvc_tiers": ["CPUMemory", "LocalNVMe"],
            "CPUMemory": {"capacity_GB": 1},
            "LocalNVMe": {"path": str(options.cache.expanduser()), "capacity_GB": 4},
        },
    }


def server_module(options: argparse.Namespace) -> dict[str, Any]:
    """`--server-module`: what the server holds, on Opal's event channel, for routers."""
    return {
        "module_path": "opal_connector.integrations.lmcache.server_module",
        "config": {
            "served_model_name": SERVED_MODEL,
            "events": {"endpoint": f"tcp://{HOST}:{options.events_port}"},
        },
    }


def server_arguments(options: argparse.Namespace) -> list[str]:
    """What LMCache's server is told besides its address. L1 is a buffer: Opal keeps the memory."""
    return [
        *("--http-port", str(options.lmcache_http_port)),
        *("--l1-size-gb", "0.5", "--eviction-policy", "noop", "--l2-store-policy", "skip_l1"),
        *("--chunk-size", str(CHUNK_TOKENS)),
        *("--supported-transfer-mode", "lmcache_driven"),
        *("--l2-adapter", json.dumps(adapter(options))),
        *("--server-module", json.dumps(server_module(options))),
    ]


def lmcache_command(options: argparse.Namespace) -> list[str]:
    """LMCache's server."""
    return [
        *(str(Path(sys.executable).with_name("lmcache")), "server"),
        *("--host", HOST, "--port", str(options.lmcache_port), "--http-host", HOST),
        *server_arguments(options),
    ]


def transfer_config(options: argparse.Namespace) -> dict[str, Any]:
    """The `--kv-transfer-config`. The connector that vLLM brings is older: hence the path."""
    extra: dict[str, Any] = {
        "lmcache.mp.host": f"tcp://{HOST}",
        "lmcache.mp.port": options.lmcache_port,
        "lmcache.mp.heartbeat_interval": 1.0,  # a restarted server is noticed soon
    }
    if options.autostart:
        extra["lmcache.mp.autostart"] = True
        extra["lmcache.mp.autostart.server_args"] = shlex.join(server_arguments(options))
        extra["lmcache.mp.autostart.wait_timeout"] = 180
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def vllm_command(options: argparse.Namespace) -> list[str]:
    """The OpenAI server. On a CPU vLLM's blocks have 128 tokens unless told otherwise."""
    model = options.model or ensure_smollm2()
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", HOST, "--port", str(options.port), "--model", str(model)),
        *("--served-model-name", SERVED_MODEL, "--dtype", "float32", "--max-model-len", "4096"),
        *("--block-size", str(BLOCK_TOKENS), "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer_config(options))),
    ]


def commands(options: argparse.Namespace) -> list[list[str]]:
    """What is to be started, in order. vLLM waits for the server while it loads the model."""
    wanted = []
    if options.only != "vllm" and not options.autostart:
        wanted.append(lmcache_command(options))
    if options.only != "lmcache":
        wanted.append(vllm_command(options))
    return wanted


def run(started: list["subprocess.Popen[bytes]"], wanted: list[list[str]]) -> int:
    """Run all until one ends or somebody asks for the end; the exit status."""
    for command in wanted:
        # Sessions of their own: Ctrl-C reaches us only, and nothing that they start is left behind.
        process = subprocess.Popen(
            command, env={**os.environ, **ENVIRONMENT}, start_new_session=True
        )
        started.append(process)
    while all(process.poll() is None for process in started):
        time.sleep(0.2)
    return int(any(process.poll() for process in started))


def stop(started: list["subprocess.Popen[bytes]"]) -> None:
    """End all, vLLM before the server that it talks to. Nothing cuts this short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for process in reversed(started):
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{process.args[0]} does not end and is killed\n")
        _signal_group(process, signal.SIGTERM)  # a server that vLLM has started
        if not _has_ended(process):
            _signal_group(process, signal.SIGKILL)
        process.wait()


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        if not _signal_group(process, 0):
            return True
        process.poll()
        time.sleep(0.05)
    return False


def _signal_group(process: "subprocess.Popen[bytes]", number: int) -> bool:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def interrupt(_signal: int, _frame: object) -> None:
    """SIGTERM ends as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    """Start what is asked for."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--model", type=Path, help="a model's directory [SmolLM2-135M]")
    made.add_argument("--port", type=int, default=8000, help="of vLLM [8000]")
    made.add_argument("--lmcache-port", type=int, default=5555, help="of LMCache's server [5555]")
    made.add_argument("--lmcache-http-port", type=int, default=8080, help="of its status [8080]")
    made.add_argument("--events-port", type=int, default=5601, help="of Opal's events [5601]")
    made.add_argument("--cache", type=Path, default=Path("~/.cache/opal-lmcache"), help="directory")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--only", choices=["lmcache", "vllm"], help="start this one only")
    which.add_argument("--autostart", action="store_true", help="let vLLM start the server")
    made.add_argument("--print", action="store_true", help="print the commands and start nothing")
    options = made.parse_args()
    wanted = commands(options)
    if options.print:
        for name, value in ENVIRONMENT.items():
            print(f"export {name}={value}")
        for command in wanted:
            print(shlex.join(command))
        return 0
    signal.signal(signal.SIGTERM, interrupt)
    started: list[subprocess.Popen[bytes]] = []
    with segments_removed():  # LMCache leaves an engine's KV in /dev/shm, however it ends
        try:
            return run(started, wanted)
        except KeyboardInterrupt:
            return 0
        finally:
            stop(started)


if __name__ == "__main__":
    sys.exit(main())
