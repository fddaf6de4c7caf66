"""A copy of a run directory in an object store (`ray.mirror`): kept up while a verb holds it, read where the folder lacks."""

import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.fs as pafs

from aarlib.config import read_json_object, write_text_atomically
from aarlib.data.conversations import open_location

logger = logging.getLogger("aarlib")

STAMP = ".mirror.json"
"""Here and there: which session wrote last, so that neither side overwrites what it has not seen."""
PUSH_EVERY_S = 60.0
EXPIRES_S = 5 * PUSH_EVERY_S
LEFT_OUT = "ray_train"
"""Ray's own state, which no start reads again."""


class Mirror:
    """`folder` beside its copy under `uri`/<name of the folder>; a URI keeps its options (`s3://bucket/runs?region=...`)."""

    def __init__(self, uri: str, folder: Path) -> None:
        base, separator, options = uri.partition("?")
        self.uri = f"{base.rstrip('/')}/{folder.name}"
        self.folder = folder
        try:
            self._store, self._root = open_location(self.uri + separator + options)
        except (OSError, ValueError) as error:
            raise ValueError(f"ray.mirror = {uri!r} cannot be opened: {error}; check URI and credentials") from error
        self._pushed: dict[str, tuple[int, int]] = {}
        self._session = ""

    def pull(self) -> int:
        """Copy what the store has into the folder; the number of files. Each is renamed into place when complete."""
        files = self._stored()
        for name in files:
            target = self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.tmp")
            with self._store.open_input_stream(f"{self._root}/{name}") as source, temporary.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            temporary.replace(target)
        if files:
            write_text_atomically(self.folder / STAMP, json.dumps(self._stamp()))
        return len(files)

    def open(self) -> None:
        """Begin a session of pushes; a ValueError where another one is going on, or has written what is not here."""
        there = self._stamp()
        if there is not None:
            age = time.time() - there["time"]
            if age < EXPIRES_S and there["who"] != _me():
                raise ValueError(
                    f"ray.mirror: {self.uri} is in use by {there['who']} ({age:.0f} s ago); wait for it, or choose another name"
                )
            here = read_json_object(self.folder / STAMP) if (self.folder / STAMP).is_file() else {}
            if here.get("session") != there["session"]:
                raise ValueError(
                    f"ray.mirror: {self.uri} was last written by {there['who']}, from another folder than {self.folder}; move "
                    "this folder away, and the run is read from the copy, or choose another name"
                )
        self._session = uuid.uuid4().hex
        self._pushed = dict.fromkeys(self._stored(), (0, 0))
        self.push()
        write_text_atomically(self.folder / STAMP, json.dumps({"session": self._session}))

    def push(self, last: bool = False) -> int:
        """Copy what changed, oldest first, so that a file that declares something finished follows what it declares; remove what
        is gone here. The number of files copied."""
        self._write(STAMP, {"session": self._session, "who": _me(), "time": 0.0 if last else time.time()})
        found = self._local()
        changed = sorted(
            (name for name in found if self._pushed.get(name) != found[name]), key=lambda name: found[name]
        )
        for name in changed:
            self._write(name, self.folder / name)
        for name in sorted({*self._pushed} - {*found}):
            self._store.delete_file(f"{self._root}/{name}")
        self._pushed = found
        return len(changed)

    def _stamp(self) -> dict[str, Any] | None:
        path = f"{self._root}/{STAMP}"
        if self._store.get_file_info(path).type != pafs.FileType.File:
            return None
        with self._store.open_input_stream(path) as stream:
            return json.loads(stream.read())

    def _write(self, name: str, content: Path | dict[str, Any]) -> None:
        path = f"{self._root}/{name}"
        if isinstance(self._store, pafs.LocalFileSystem):
            self._store.create_dir(str(PurePosixPath(path).parent), recursive=True)
        data = content.read_bytes() if isinstance(content, Path) else json.dumps(content).encode()
        with self._store.open_output_stream(path, compression=None) as stream:
            stream.write(data)

    def _stored(self) -> list[str]:
        infos = self._store.get_file_info(pafs.FileSelector(self._root, recursive=True, allow_not_found=True))
        names = [info.path.removeprefix(f"{self._root}/") for info in infos if info.type == pafs.FileType.File]
        return sorted(name for name in names if name != STAMP)

    def _local(self) -> dict[str, tuple[int, int]]:
        """Files by name with (time of change in ns, bytes); locks and temporary names begin with a dot."""
        found = {}
        for path in self.folder.rglob("*"):
            inner = path.relative_to(self.folder)
            if LEFT_OUT not in inner.parts and path.name[0] != "." and path.is_file():
                status = path.stat()
                found[inner.as_posix()] = (status.st_mtime_ns, status.st_size)
        return found


def restore(uri: str | None, folder: Path) -> None:
    """Read a run directory that is missing here from its copy, if there is one."""
    if uri is None or (folder / "config.json").is_file():
        return
    mirror = Mirror(uri, folder)
    if count := mirror.pull():
        logger.info("%s: %d files from %s", folder.name, count, mirror.uri)


@contextmanager
def kept_up(uri: str | None, folder: Path) -> Iterator[None]:
    """Push every minute and at the end. A failed push is reported and made up by the next; an OSError where the last fails."""
    if uri is None:
        yield
        return
    restore(uri, folder)
    mirror, ended = Mirror(uri, folder), threading.Event()
    mirror.open()

    def push_again() -> None:
        while not ended.wait(PUSH_EVERY_S):
            try:
                mirror.push()
            except OSError as error:
                logger.warning("%s was not copied to %s: %s", folder, mirror.uri, error)

    thread = threading.Thread(target=push_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        mirror.push(last=True)
        logger.info("%s is copied to %s", folder, mirror.uri)


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
