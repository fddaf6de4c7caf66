"""Where run directories lie: in a folder, or in an object store with a working copy on this machine."""

import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.fs as pafs

from aarlib.data.conversations import open_location

SCRATCH = "AARLIB_SCRATCH"
"""Environment variable of a node: the folder for working copies of runs whose `ray.storage` is a URI."""
DEFAULT_SCRATCH = "~/.cache/aarlib/runs"


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


class StoredFolder:
    """Folder `name` under the URI `storage`, which keeps its options (`s3://bucket/runs?region=...`); its files by inner path.

    An OSError where the store does not answer or refuses; a ValueError for a URI that cannot be opened.
    """

    def __init__(self, storage: str, name: str) -> None:
        base, separator, options = storage.partition("?")
        self.uri = f"{base.rstrip('/')}/{name}"
        try:
            self._filesystem, self._root = open_location(self.uri + separator + options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"ray.storage = {storage!r} cannot be opened: {error}; check URI and credentials"
            ) from error

    def files(self) -> list[str]:
        """Sorted; none where there is no such folder."""
        found = self._filesystem.get_file_info(pafs.FileSelector(self._root, recursive=True, allow_not_found=True))
        return sorted(info.path.removeprefix(f"{self._root}/") for info in found if info.type == pafs.FileType.File)

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
        path = f"{self._root}/{name}"
        if isinstance(self._filesystem, pafs.LocalFileSystem):
            self._filesystem.create_dir(str(PurePosixPath(path).parent), recursive=True)
        with self._filesystem.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def delete(self, name: str) -> None:
        """Nothing where it is gone already."""
        if self._has(name):
            self._filesystem.delete_file(f"{self._root}/{name}")

    def _has(self, name: str) -> bool:
        return self._filesystem.get_file_info(f"{self._root}/{name}").type == pafs.FileType.File
