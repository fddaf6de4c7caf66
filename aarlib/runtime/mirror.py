"""A run directory whose `ray.storage` is a URI: the object store has it, a folder on this machine is worked in and pushed.

One driver at a time may push (its session stands in STAMP); beside it, a worker group that writes from another node pushes what
it writes (WRITER, see aarlib.runtime.writer), and is collected by the driver.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import psutil

from aarlib.config import read_json_object, write_text_atomically
from aarlib.runtime.storage import StoredFolder, is_uri, storage_folder

logger = logging.getLogger("aarlib")

STAMP, WRITER = ".mirror.json", ".writer.json"
"""Who pushes into this folder of the store: a driver (also noted in the working copy), a worker group on another node."""
PUSH_EVERY_S = 60.0
EXPIRES_S = 5 * PUSH_EVERY_S
"""A session that was not renewed for so long has ended."""
POLL_S = 5.0
LEFT_OUT = ("ray_train", "prefix_cache")
"""Folders that no start reads again: Ray's own state, and what can be computed again."""


class Mirror:
    """Run `name` under the URI `storage`, and its working copy."""

    def __init__(self, storage: str, name: str) -> None:
        self.store = StoredFolder(storage, name)
        self.uri = self.store.uri
        self.folder = storage_folder(storage) / name
        self._pushed: dict[str, tuple[int, int]] = {}
        self._mark, self._session, self._me = "", "", _me()
        self._pushing = threading.Lock()

    def update(self) -> bool:
        """Bring the working copy to the state of the store, where another machine has written that since; whether it had."""
        there, here = self.store.read_json(STAMP), self._sessions_here()
        session = None if there is None else there["session"]
        if session in here:
            return False
        if session is None:
            raise ValueError(
                f"ray.storage: {self.uri} is gone, its working copy {self.folder} is not; remove that too to start afresh, or "
                "choose another name"
            )
        count = self.pull(exact=True)
        self._note(session, session)
        logger.info("%d files from %s", count, self.uri)
        return True

    def pull(self, below: str = "", exact: bool = False) -> int:
        """Copy what the store has `below` into the folder, each file renamed into place when complete; the number of files.

        `exact`: remove what the store has not.
        """
        files = [name for name in self._stored() if name.startswith(below)]
        for name in files:
            self.store.fetch(name, self.folder / name)
        if exact:
            for name in {name for name in self._local() if name.startswith(below)} - {*files}:
                (self.folder / name).unlink()
        return len(files)

    def open(self) -> None:
        """Begin this process's session of pushes; a ValueError where another one goes on pushing."""
        self._wait_for_others()
        is_fresh = self.update()
        self.collect()
        self._pushed = self._local() if is_fresh else dict.fromkeys(self._stored(), (0, 0))
        self._begin(STAMP)
        self.push()
        self._note(self._session, self._session)

    def take(self) -> None:
        """Begin to push what a worker group writes on this node, from an exact copy of the store; ends one before it."""
        self.pull(exact=True)
        self._pushed = self._local()
        self._begin(WRITER)

    def collect(self) -> None:
        """Read what worker groups on other nodes wrote here or below, and end their right to write."""
        for path in self.store.files():
            if PurePosixPath(path).name == WRITER:
                self.pull(below=path.removesuffix(WRITER))
                self.store.delete(path)

    def push(self, last: bool = False) -> int:
        """Copy what changed, oldest first, so that a file that declares something finished follows what it declares; remove what
        is gone here. The number of files copied. A ValueError where another session has taken over."""
        with self._pushing:
            there = self.store.read_json(self._mark)
            if there is None or there["session"] != self._session:
                raise ValueError(
                    f"ray.storage: {self.uri} was taken over by another process; nothing more is written to it"
                )
            self._stamp(ended=last)
            found = self._local()
            changed = [
                name for name in sorted(found, key=lambda name: found[name]) if self._pushed.get(name) != found[name]
            ]
            for name in changed:
                try:
                    self.store.write(name, (self.folder / name).read_bytes())
                except FileNotFoundError:
                    if (self.folder / name).exists():
                        raise
                    del found[name]
            for name in sorted({*self._pushed} - {*found}):
                self.store.delete(name)
            self._pushed = found
            return len(changed)

    def try_push(self) -> None:
        """A push whose failure is reported, and made up by the next one."""
        try:
            self.push()
        except OSError as error:
            logger.warning("%s was not copied to %s: %s", self.folder, self.uri, error)

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Push every minute, and at the end; that one raises where it fails."""
        ended = threading.Event()

        def push_again() -> None:
            while not ended.wait(PUSH_EVERY_S):
                try:
                    self.try_push()
                except ValueError as error:
                    logger.error("%s", error)
                    return

        thread = threading.Thread(target=push_again, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.push(last=True)

    def _wait_for_others(self) -> None:
        there = self.store.read_json(STAMP)
        if there is None or time.time() - there["time"] >= EXPIRES_S or _is_gone(there):
            return
        logger.info("%s: waiting whether %s still writes to it", self.uri, there["who"])
        end = time.monotonic() + EXPIRES_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            now = self.store.read_json(STAMP)
            if now is None or now["time"] == 0.0:
                return
            if now != there:
                raise ValueError(
                    f"ray.storage: {self.uri} is in use by {now['who']}; wait for it, or choose another name"
                )

    def _sessions_here(self) -> tuple[str | None, ...]:
        """Sessions of the store that this working copy is not behind; None is that of an empty store."""
        path = self.folder / STAMP
        if not path.is_file():
            return (None,)
        stored = read_json_object(path)
        return (stored["session"], stored["before"])

    def _note(self, session: str, before: str | None) -> None:
        write_text_atomically(self.folder / STAMP, json.dumps({"session": session, "before": before}))

    def _begin(self, mark: str) -> None:
        """Here first, with what the store has before: an end between the two writes leaves the working copy valid."""
        self._mark, self._session = mark, uuid.uuid4().hex
        if mark == STAMP:
            there = self.store.read_json(STAMP)
            self._note(self._session, None if there is None else there["session"])
        self._stamp()

    def _stamp(self, ended: bool = False) -> None:
        content = {"session": self._session, **self._me, "time": 0.0 if ended else time.time()}
        self.store.write(self._mark, json.dumps(content).encode())

    def _stored(self) -> list[str]:
        return [path for path in self.store.files() if _is_kept(path)]

    def _local(self) -> dict[str, tuple[int, int]]:
        """Files by name with (time of change in ns, bytes)."""
        found = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            if _is_kept(name) and path.is_file():
                status = path.stat()
                found[name] = (status.st_mtime_ns, status.st_size)
        return found


@contextmanager
def kept_up(storage: str, name: str) -> Iterator[None]:
    """Hold the run in the store and push its working copy; nothing where `storage` is a folder."""
    if not is_uri(storage):
        yield
        return
    mirror = Mirror(storage, name)
    with _reached(mirror):
        mirror.open()
    with mirror.pushing():
        yield
    logger.info("%s is copied to %s", mirror.folder, mirror.uri)


def update(storage: str, name: str) -> None:
    """The working copy as the store has it; nothing where `storage` is a folder."""
    if is_uri(storage):
        mirror = Mirror(storage, name)
        with _reached(mirror):
            mirror.update()


def collect(storage: str, name: str) -> None:
    """What worker groups on other nodes wrote, into the working copy; nothing where `storage` is a folder."""
    if is_uri(storage):
        Mirror(storage, name).collect()


@contextmanager
def _reached(mirror: Mirror) -> Iterator[None]:
    """A store that refuses at the start is a wrong setting; later it is a failure."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"ray.storage: {mirror.uri} cannot be reached: {str(error).splitlines()[0]}; check URI, network and credentials"
        ) from error


def _is_kept(name: str) -> bool:
    """Locks, marks and temporary names begin with a dot."""
    return not any(part.startswith(".") or part in LEFT_OUT for part in name.split("/"))


def _me() -> dict[str, Any]:
    return {
        "who": f"process {os.getpid()} on {socket.gethostname()}",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def _is_gone(there: dict[str, Any]) -> bool:
    """Whether the process that wrote a stamp ended, as far as this machine can tell."""
    if there["host"] != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(there["pid"]).create_time() - there["started"]) >= 1
    except psutil.NoSuchProcess:
        return True
