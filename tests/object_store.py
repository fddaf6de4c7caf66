"""Local object stores for tests: an S3 server of the package moto, a Google Cloud Storage server of gcp-storage-emulator."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow.fs as pafs
import pytest

s3_server = pytest.importorskip("moto.server")
pytest.importorskip("gcp_storage_emulator")

SCHEMES = ("s3", "gs")


class ObjectStore(NamedTuple):
    filesystem: pafs.FileSystem
    prefix: str
    """Of a URI, before the bucket."""
    options: str
    """Of a URI, behind `?`."""

    def uri(self, path: str) -> str:
        return f"{self.prefix}{path}?{self.options}"


@contextmanager
def object_store(scheme: str, bucket: str) -> Iterator[ObjectStore]:
    """A running server with an empty bucket, and what leads to it in the environment."""
    with _s3(bucket) if scheme == "s3" else _gs(bucket) as store:
        yield store


@contextmanager
def _s3(bucket: str) -> Iterator[ObjectStore]:
    running = s3_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "none")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "none")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        filesystem = pafs.S3FileSystem(
            endpoint_override=f"{host}:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        filesystem.create_dir(bucket)
        yield ObjectStore(filesystem, "s3://", f"scheme=http&endpoint_override={host}%3A{port}&region=us-east-1")
    running.stop()


@contextmanager
def _gs(bucket: str) -> Iterator[ObjectStore]:
    """In a process of its own: Arrow waits for Google's answers with Python's lock held."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "gcp_storage_emulator",
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
        "-q",
    ]
    with subprocess.Popen(command) as running:
        try:
            _wait_for(port)
            address = f"127.0.0.1:{port}"
            filesystem = pafs.GcsFileSystem(
                anonymous=True, endpoint_override=address, scheme="http", project_id="tests"
            )
            filesystem.create_dir(bucket)
            options = f"scheme=http&endpoint_override=127.0.0.1%3A{port}&retry_limit_seconds=10"
            yield ObjectStore(filesystem, "gs://anonymous@", options)
        finally:
            running.terminate()


def _wait_for(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the storage server did not come up")
