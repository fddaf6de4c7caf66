"""A local S3 server for tests, from the package moto."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pyarrow.fs as pafs
import pytest

server = pytest.importorskip("moto.server")


class ObjectStore(NamedTuple):
    filesystem: pafs.S3FileSystem
    options: str
    """The part of a URI behind `?` that leads to it."""


@contextmanager
def object_store(bucket: str) -> Iterator[ObjectStore]:
    """A running server with an empty bucket, and credentials in the environment."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
        yield ObjectStore(filesystem, f"scheme=http&endpoint_override={host}%3A{port}&region=us-east-1")
    running.stop()
