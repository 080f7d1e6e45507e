"""Runs in Dynamo's environment: a SelectionService that is asked line by line.

The first line of standard input describes the worker; every other line is a prompt's token ids as
JSON, and the answer is a line of JSON with what the service credits the worker with.
"""

import asyncio
import json
import sys
from typing import Any

from dynamo._core import SelectionService

_SUBSCRIPTION_SECONDS = 1.0  # a ZMQ subscription takes a moment, and nothing says when it is there


async def credits_of(service: SelectionService, model: str, tokens: list[int]) -> dict[str, Any]:
    """The blocks of a prompt that the only worker has, by tier, and the prefill that is left."""
    question = {"model_name": model, "token_ids": tokens}
    (worker,) = (await service.overlap_scores(question))["workers"]
    selected = await service.select(question)
    return {
        "device_blocks": worker["device_blocks"],
        "host_blocks": worker["host_pinned_extension_blocks"],
        "disk_blocks": worker["disk_extension_blocks"],
        "shared_blocks": worker["shared_beyond_device_blocks"] or 0,
        "prefill_tokens": selected["effective_prefill_tokens"],
    }


async def main() -> None:
    worker = json.loads(sys.stdin.readline())
    service = SelectionService()
    # JSON has no integer keys, and the service takes no others.
    worker["kv_events_endpoints"] = {0: worker.pop("events")}
    await service.upsert_worker(worker)
    await asyncio.sleep(_SUBSCRIPTION_SECONDS)
    print(json.dumps({"ready": True}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        answer = await credits_of(service, worker["model_name"], json.loads(line))
        print(json.dumps(answer), flush=True)
    service.shutdown()


asyncio.run(main())
