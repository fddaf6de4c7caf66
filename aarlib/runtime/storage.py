"""Where run directories lie: in a folder, or in an object store with a working copy on this machine."""

import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.fs as pafs

from aarlib.data.conversations import open_location

SCRATCH = "AARLIB_SCRATCH"
"""Environment variable of a node: the folder for working copies of runs whose `ray.storage` is a URI."""
DEFAULT_SCRATCH = "~/.cache/aarlib/runs"
LOCK, WRITER_LOCK = ".lock", ".writer.lock"
"""Held by the driver of a run directory, and by the rank 0 that writes into it."""


def is_uri(storage: str | Path) -> bool:
    return "://" in str(storage)


def storage_folder(storage: str | Path) -> Path:
    """The folder on this machine under which run directories are worked in; one of its own for every URI."""
    if not is_uri(storage):
        return Path(storage).expanduser().resolve()
    base = str(storage).partition("?")[0].rstrip("/")
    scratch = Path(os.environ.get(SCRATCH) or DEFAULT_SCRATCH).expanduser().resolve()
    return scratch / hashlib.sha256(base.encode()).hexdigest()[:16]


def located(storage: str | Path) -> str:
    """`storage` as other processes and nodes find it: a URI, or an absolute path."""
    return str(storage) if is_uri(storage) else str(storage_folder(storage))


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Wait until no worker group of this machine writes into `folder`: one whose driver was killed may live on for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / WRITER_LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class StoredFolder:
    """Folder `name` under the URI `storage`, which keeps its options (`s3://bucket/runs?region=...`); its files by inner path.

    An OSError where the store does not answer or refuses; a ValueError for a URI that cannot be opened.
    """

    def __init__(self, storage: str, name: str) -> None:
        self.uri = f"{storage.partition('?')[0].rstrip('/')}/{name}"
        try:
            self._filesystem, base = open_location(storage)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"ray.storage = {storage!r} cannot be opened: {error}; check URI and credentials"
            ) from error
        self._root = f"{base.rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int]:
        """In bytes, of every file; nothing where there is no such folder."""
        found = self._filesystem.get_file_info(pafs.FileSelector(self._root, recursive=True, allow_not_found=True))
        files = [info for info in found if info.type == pafs.FileType.File]
        return {info.path.removeprefix(f"{self._root}/"): info.size for info in files}

    def read_json(self, name: str) -> dict[str, Any] | None:
        if not self._has(name):
            return None
        with self._filesystem.open_input_stream(f"{self._root}/{name}") as stream:
            return json.loads(stream.read())

    def fetch(self, name: str, target: Path) -> None:
        """Copy to `target`, renamed into place when complete."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        with self._filesystem.open_input_stream(f"{self._root}/{name}") as source, temporary.open("wb") as sink:
            shutil.copyfileobj(source, sink)
        temporary.replace(target)

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all: an object store shows an object when it is complete, a folder a renamed file."""
        path = PurePosixPath(self._root) / name
        is_local = isinstance(self._filesystem, pafs.LocalFileSystem)
        if is_local:
            self._filesystem.create_dir(str(path.parent), recursive=True)
        written = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp") if is_local else path
        with self._filesystem.open_output_stream(str(written), compression=None) as stream:
            stream.write(data)
        if is_local:
            self._filesystem.move(str(written), str(path))

    def delete(self, name: str) -> None:
        """Nothing where it is gone already."""
        if self._has(name):
            self._filesystem.delete_file(f"{self._root}/{name}")

    def _has(self, name: str) -> bool:
        return self._filesystem.get_file_info(f"{self._root}/{name}").type == pafs.FileType.File
