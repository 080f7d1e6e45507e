"""A real S3 endpoint on this host, for tests: moto's server as a process of its own."""

import contextlib
import functools
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import boto3
from botocore.config import Config

from opal_connector.cli.server_process import free_port
from opal_connector.tiers.header_scan import batches

HOST: Final = "127.0.0.1"
BUCKET: Final = "opal-test"
ACCESS_KEY: Final = "test-access-key"
SECRET_KEY: Final = "test-secret-that-nobody-may-see"
_START_SECONDS_MAX: Final = 60.0
_POLL_SECONDS: Final = 0.05


@dataclass
class ObjectStoreServer:
    """moto's S3 server on a free port; it holds what it has in memory.

    The `raw_` methods go around the connector's client, as an operator's own tool would.
    """

    checks_credentials: bool = False  # moto only asks for rights where it is told to
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        """The connector's options that lead here."""
        return {
            "aws_endpoint": self.endpoint,
            "aws_allow_http": "true",
            "aws_region": "us-east-1",
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
        }

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        self._process = self._begun()
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            assert self._process.poll() is None, "the S3 server has ended"
            assert time.monotonic() < deadline, "the S3 server does not answer"
            time.sleep(_POLL_SECONDS)

    def _begun(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        if self.checks_credentials:
            environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "1"  # the bucket is made first
        command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(self.port)]
        return quiet_process(command, environment)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()  # a paused process ends too
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # The signal is sent; wait until it has arrived.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self, *, empty: bool) -> None:
        """Stop and start at the same port: with the bucket, and with what was in it or nothing."""
        kept = {} if empty else {key: self.raw_get(key) for key in self.raw_list()}
        self.stop()
        self.start()
        self.make_bucket()
        self.raw_put_all(kept)

    def make_bucket(self, bucket: str = BUCKET) -> None:
        self._client.create_bucket(Bucket=bucket)

    def raw_put(self, key: str, value: bytes) -> None:
        """By a request whose signature is none, which this server takes: tests put thousands."""
        scope = f"{ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
        login = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        connection = http.client.HTTPConnection(HOST, self.port)
        with contextlib.closing(connection):
            connection.request("PUT", f"/{BUCKET}/{key}", value, {"Authorization": login})
            assert connection.getresponse().status == http.HTTPStatus.OK

    def raw_put_all(self, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            self.raw_put(key, value)

    def raw_get(self, key: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return body

    def raw_delete(self, key: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def raw_clear(self) -> None:
        """Take everything away."""
        for keys in batches(self.raw_list(), 1000):
            objects = [{"Key": key} for key in keys]
            self._client.delete_objects(Bucket=BUCKET, Delete={"Objects": objects})

    def raw_list(self, prefix: str = "") -> list[str]:
        pages = self._client.get_paginator("list_objects_v2")
        return [
            found["Key"]
            for page in pages.paginate(Bucket=BUCKET, Prefix=prefix)
            for found in page.get("Contents", ())
        ]

    def open_uploads(self) -> int:
        """Multipart uploads that were begun and neither completed nor given up."""
        return len(self._client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ()))

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((HOST, self.port), timeout=1).close()
            return True
        return False

    @functools.cached_property
    def _client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 1}, s3={"addressing_style": "path"}),
        )


def quiet_process(
    command: list[str], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """A process that neither reads nor writes where the tests do."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
