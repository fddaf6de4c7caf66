"""A folder on this machine and the folder of a store that it is a copy of: what each has, and making one what the other is."""

import filecmp
import logging
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from aarlib.runtime.storage import StoredFolder, storage_folder

logger = logging.getLogger("aarlib")

WRITER, START = ".writer.json", ".start"
"""In the store: which worker group writes a run (in the copy it writes: its session). In the driver's copy: one was started."""
ENDED = "ended"
LEFT_OUT = ("ray_train", "prefix_cache")
"""Folders that no start reads again: Ray's own state, and what can be computed again."""


class WorkingCopy:
    """Run `name` under the URI `storage`, and its copy."""

    def __init__(self, storage: str, name: str) -> None:
        self.store = StoredFolder(storage, name)
        self.uri = self.store.uri
        self.folder = storage_folder(storage) / name

    def pull(self, below: str = "") -> int:
        """Make the folder `below` what the store has there, once all of it is read; the number of files. What only the folder had
        is set aside."""
        names = [name for name in self.store.sizes() if is_kept(name) and name.startswith(below)]
        staged = self.folder / f".pull-{uuid.uuid4().hex}"
        try:
            for name in names:
                self.store.fetch(name, staged / name)
            self._set_aside(below, staged)
            for name in names:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (staged / name).replace(self.folder / name)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return len(names)

    def wrote_here(self, group: dict[str, Any], below: str = "") -> bool:
        """Whether this copy is the one that a worker group wrote: then it is ahead of what was pushed, not behind."""
        path = self.folder / below / WRITER
        return path.is_file() and group["session"].removeprefix(f"{ENDED} ") == path.read_text(encoding="utf-8")

    def upload(self, below: str = "") -> None:
        """Make the store what the folder has `below`, oldest first."""
        files = {name: state for name, state in self.local().items() if name.startswith(below)}
        for name in sorted(files, key=files.__getitem__):
            self.copy(name)
        for name in self.store.sizes():
            if is_kept(name) and name.startswith(below) and name not in files:
                self.store.delete(name)

    def copy(self, name: str) -> bool:
        """False where the file is gone."""
        try:
            content = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return False
        self.store.write(name, content)
        return True

    def _set_aside(self, below: str, staged: Path) -> None:
        """Move what is not `staged`, or otherwise, to a folder beside: a process that ended had not pushed it. What was
        handed over and not touched since was pushed then, and gives way."""
        place, start = self.folder / f".aside-{time.time_ns()}", self.folder / below / START
        handed_ns = start.stat().st_mtime_ns if start.is_file() else 0
        local = {name: state for name, state in self.local().items() if name.startswith(below)}
        differs = [name for name in local if not _is_same(self.folder / name, staged / name)]
        only_here = [name for name in differs if local[name][0] > handed_ns]
        for name in {*differs} - {*only_here}:
            (self.folder / name).unlink()
        for name in only_here:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).rename(place / name)
        if only_here:
            logger.warning(
                "%s is behind %s; %d files are set aside in %s", self.folder, self.uri, len(only_here), place
            )

    def local(self) -> dict[str, tuple[int, int]]:
        """Files by name with (time of change in ns, bytes)."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if is_kept(name) and path.is_file():
                status = path.stat()
                found[name] = (status.st_mtime_ns, status.st_size)
        return found


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and filecmp.cmp(one, other, shallow=False)


def is_kept(name: str) -> bool:
    """Locks, marks and temporary names begin with a dot."""
    return not any(part.startswith(".") or part in LEFT_OUT for part in name.split("/"))
