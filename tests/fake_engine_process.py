"""`FakeEngine` as a process of its own, with the command line of vLLM's server. A script.

What else it does is said in its environment: FAKE_DIES (it ends at once), FAKE_CHILD (a file that
gets the number of a child that it leaves running), FAKE_DEAF (it does not heed SIGTERM),
FAKE_TOKEN_SECONDS, FAKE_FIRST_LINE.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from fake_engine import MODEL, FakeEngine

from opal_connector.config import parse_endpoint


async def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv-transfer-config", type=json.loads)
    given, _ = parser.parse_known_args()
    sys.stdout.write(os.environ.get("FAKE_FIRST_LINE", "a fake engine begins") + "\n")
    sys.stdout.flush()
    if os.environ.get("FAKE_DIES"):
        sys.exit("it dies at once")
    if child_file := os.environ.get("FAKE_CHILD"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(child_file).write_text(str(child.pid))
    transfer = given.kv_transfer_config
    extra = transfer["kv_connector_extra_config"] if transfer else {}
    engine = FakeEngine(
        extra.get("instance_id", "fake"),
        model=MODEL,
        token_seconds=float(os.environ.get("FAKE_TOKEN_SECONDS", "0")),
    )
    engine.port = given.port
    await engine.listen()
    if extra:
        events = extra["events"]
        await engine._publish(
            parse_endpoint(events["endpoint"]), parse_endpoint(events["publish_endpoint"])
        )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    is_deaf = bool(os.environ.get("FAKE_DEAF"))
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if is_deaf else stop.set)
    await stop.wait()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
