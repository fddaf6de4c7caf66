"""Where rank 0 of a worker group writes, and where any node finds an adapter: the run directory, or a copy of it in a store."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aarlib.runtime.mirror import Mirror
from aarlib.runtime.storage import is_uri, sole_writer, storage_folder
from aarlib.runtime.working_copy import START
from aarlib.training.adapter import holds_adapter


class Writer(NamedTuple):
    folder: Path
    push: Callable[[], object]
    """Copies what was written so far to where a group on any node, and the driver, can read it."""


@contextmanager
def writer(storage: str, name: str, token: str) -> Iterator[Writer]:
    """For the run `name` that its driver has handed over; `storage` is as `located` gives it.

    A ValueError on a node that sees neither the driver's folder nor a URI.
    """
    folder = storage_folder(storage) / name
    if is_uri(storage):
        mirror = Mirror(storage, name)
        with sole_writer(folder):
            mirror.take(token)
            with mirror.pushing(when_taken=lambda: None):
                yield Writer(folder, mirror.try_push)
        return
    start = folder / START
    if not start.is_file() or start.read_text(encoding="utf-8") != token:
        raise ValueError(_not_seen(storage, folder))
    with sole_writer(folder):
        yield Writer(folder, lambda: None)


def adapter_folder(storage: str, name: str, sha256: str) -> Path:
    """The adapter `name` (`<run>/aar-seed0/adapter`) as a process on any node reads it; `storage` is as `located` gives it.

    A ValueError on a node that sees it neither in a folder nor under a URI.
    """
    folder = storage_folder(storage) / name
    if is_uri(storage):
        with sole_writer(folder.parent):
            if not holds_adapter(folder, sha256):
                Mirror(storage, name).pull()
    if not holds_adapter(folder, sha256):
        raise ValueError(_not_seen(storage, folder))
    return folder


def _not_seen(storage: str, folder: Path) -> str:
    return (
        f"ray.storage = {storage!r}: node {socket.gethostname()} does not see the driver's {folder}; give a folder that all "
        "nodes share, or a URI (s3://, gs://)"
    )
