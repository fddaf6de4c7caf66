"""Where rank 0 of a worker group writes: the driver's folder where its node has that, else a copy pushed to `ray.storage`."""

import fcntl
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aarlib.config import write_text_atomically
from aarlib.runtime.mirror import Mirror
from aarlib.runtime.storage import is_uri, storage_folder
from aarlib.training.adapter import read_metadata

START, LOCK = ".start", ".writer.lock"


class Writer(NamedTuple):
    folder: Path
    push: Callable[[], object]
    """Copies what was written so far to where a group on any node, and the driver, can read it."""


def mark_start(folder: Path) -> str:
    """Leave a token by which a worker recognises the driver's folder: another node may have one of the same path."""
    token = uuid.uuid4().hex
    write_text_atomically(folder / START, token)
    return token


@contextmanager
def writer(storage: str, name: str, token: str) -> Iterator[Writer]:
    """For the run `name`, whose driver left `token`; `storage` is as `located` gives it.

    A ValueError on a node that sees neither the driver's folder nor a URI.
    """
    folder = storage_folder(storage) / name
    path = folder / START
    if path.is_file() and path.read_text(encoding="utf-8") == token:
        with _sole(folder):
            yield Writer(folder, lambda: None)
        return
    if not is_uri(storage):
        raise ValueError(_not_seen(storage, folder))
    mirror = Mirror(storage, name)
    mirror.folder.mkdir(parents=True, exist_ok=True)
    with _sole(mirror.folder):
        mirror.take()
        with mirror.pushing():
            yield Writer(mirror.folder, mirror.try_push)


def adapter_folder(storage: str, name: str, sha256: str) -> Path:
    """The adapter `name` (`<run>/aar-seed0/adapter`) as a process on any node reads it; `storage` is as `located` gives it.

    A ValueError on a node that sees it neither in a folder nor under a URI.
    """
    folder = storage_folder(storage) / name
    if is_uri(storage):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _sole(folder.parent):
            if not _is_adapter(folder, sha256):
                Mirror(storage, name).pull(exact=True)
    if not _is_adapter(folder, sha256):
        raise ValueError(_not_seen(storage, folder))
    return folder


def _is_adapter(folder: Path, sha256: str) -> bool:
    return folder.is_dir() and read_metadata(folder)["sha256"] == sha256


def _not_seen(storage: str, folder: Path) -> str:
    return (
        f"ray.storage = {storage!r}: node {socket.gethostname()} does not see the driver's {folder}; give a folder that all "
        "nodes share, or a URI (s3://, gs://)"
    )


@contextmanager
def _sole(folder: Path) -> Iterator[None]:
    """Wait until no other worker group writes into `folder`: one whose driver was killed may live on for a while."""
    with (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
