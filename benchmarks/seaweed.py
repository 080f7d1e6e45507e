"""An S3 server that is fast enough to measure against: SeaweedFS, in memory."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from opal_connector.cli.demo_stores import DemoStore
from opal_connector.cli.server_process import HOST, free_port

KEY = "benchmark"
BUCKET = "opal"
_READY_SECONDS = 60.0


@contextmanager
def running_seaweed(directory: Path) -> Iterator[DemoStore]:
    """A server with one bucket, for the length of a `with` block."""
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    port = free_port()
    credentials = [{"accessKey": KEY, "secretKey": KEY}]
    identities = [{"name": KEY, "credentials": credentials, "actions": ["Admin"]}]
    (directory / "s3.json").write_text(json.dumps({"identities": identities}))
    ports = [
        f"-{part}.{kind}={free_port()}"
        for part in ("master", "volume", "filer")
        for kind in ("port", "port.grpc")
    ]
    command = [program, "server", f"-dir={directory}", f"-ip={HOST}", "-s3", f"-s3.port={port}"]
    command += [f"-s3.port.grpc={free_port()}", f"-s3.config={directory / 's3.json'}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=64"]
    command += ["-master.volumeSizeLimitMB=512", *ports]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(f"http://{HOST}:{port}")
        options = {
            "aws_endpoint": f"http://{HOST}:{port}",
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }
        yield DemoStore(
            "ObjectStore",
            {"url": f"s3://{BUCKET}/kv", "options": options},
            {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": KEY},
        )
    finally:
        process.kill()
        process.wait()


def _make_bucket(url: str) -> None:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client: Any = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEY,
        aws_secret_access_key=KEY,
        config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        with suppress(BotoCoreError, ClientError):
            if not client.list_buckets()["Buckets"]:
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="is-ready", Body=b"1")
            return
        time.sleep(0.2)
    raise TimeoutError("the S3 server does not take a value")
