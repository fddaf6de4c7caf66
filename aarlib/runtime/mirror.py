"""A run directory in an object store and its working copy on this machine: sessions, pushes, and what is behind what.

One driver at a time holds a run: its session stands in STAMP. While a worker group trains, the run's files are the group's
(WRITER), from whatever node it writes: the driver hands them over, pushes the rest, and collects them afterwards. A working copy
that is behind the store is brought up to it; what only the copy had is set aside.
"""

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import psutil

from aarlib.config import read_json_object, write_text_atomically
from aarlib.runtime.working_copy import ENDED, START, WRITER, WorkingCopy, is_kept

logger = logging.getLogger("aarlib")

STAMP = ".mirror.json"
"""In the store: who holds a run. In a working copy: the session that it is of."""
PUSH_EVERY_S = 60.0
EXPIRES_S = 5 * PUSH_EVERY_S
"""A session that was not renewed for so long has ended."""
POLL_S, SETTLE_S = 5.0, 1.0
"""Between looks at a session that may be alive; until two that begin at once see each other."""


class Mirror(WorkingCopy):
    """Run `name` under the URI `storage`, and its working copy."""

    def __init__(self, storage: str, name: str) -> None:
        super().__init__(storage, name)
        self._pushed: dict[str, tuple[int, int]] = {}
        self._mark, self._session, self._me, self._is_over = "", "", _me(), False
        self._pushing, self._stamping = threading.Lock(), threading.Lock()

    def update(self) -> str | None:
        """Bring the working copy to the state of the store, where another machine has written that since; the store's session."""
        there = self.store.read_json(STAMP)
        session = None if there is None else there["session"]
        if session in self._sessions_here():
            return session
        if there is None:
            raise ValueError(
                f"ray.storage: {self.uri} is gone, its working copy {self.folder} is not; remove that too to start afresh, or "
                "choose another name"
            )
        count = self.pull()
        seen = session if there["time"] == 0.0 else f"{session}, not yet ended"
        self._note(seen, seen)
        logger.info("%d files from %s", count, self.uri)
        return session

    def open(self) -> None:
        """Begin this process's session; a ValueError where another one goes on, or began meanwhile."""
        self._wait_for_others()
        before = self.update()
        there = self.store.read_json(STAMP)
        if there is not None and there["session"] != before:
            raise self._in_use(there)
        self._mark, self._session = STAMP, uuid.uuid4().hex
        self._note(self._session, before)
        self._begin()
        with self._renewed():
            self.collect()
            for name in filter(is_kept, self.store.sizes()):
                if not (self.folder / name).is_file():
                    self.store.fetch(name, self.folder / name)
            self.push()
        self._note(self._session, self._session)

    def hand_over(self, token: str) -> None:
        """Give all files to the worker group that is started with `token`."""
        self.collect()
        write_text_atomically(self.folder / START, token)
        self.upload()
        self.store.write(WRITER, json.dumps({"session": "", "token": token, **self._me}).encode())

    def take(self, token: str) -> None:
        """Begin to push what the worker group of `token` writes on this node, from what was pushed before; or, where an earlier
        group of this start wrote here, from what that wrote."""
        group = self.store.read_json(WRITER)
        if group is None or group["token"] != token:
            raise ValueError(f"ray.storage: {self.uri} was handed to another worker group")
        if self.wrote_here(group):
            self.upload()
        else:
            self.pull()
        self._pushed = self.local()
        self._mark, self._session = WRITER, uuid.uuid4().hex
        self._me = {**self._me, "token": token}
        write_text_atomically(self.folder / WRITER, self._session)
        self._begin()

    def collect(self, token: str | None = None) -> None:
        """Take back what worker groups (or that of `token` only) wrote here or below, and end their right to write."""
        for path in [path for path in self.store.sizes() if PurePosixPath(path).name == WRITER]:
            group, below = self.store.read_json(path), path.removesuffix(WRITER)
            if group is None or token not in (None, group["token"]):
                continue
            if not group["session"].startswith(ENDED):
                group["session"] = f"{ENDED} {group['session']}"
                self.store.write(path, json.dumps(group).encode())
            if self.wrote_here(group, below):
                self.upload(below)
            else:
                self.pull(below)
            self.store.delete(path)
        for start in self.folder.rglob(START):
            if token in (None, start.read_text(encoding="utf-8")):
                start.unlink()

    def push(self, last: bool = False) -> int:
        """Copy what changed, oldest first, so that a file that declares something finished follows what it declares; remove what
        is gone here. The number of files copied. A ValueError where another session has taken over."""
        with self._pushing:
            self._renew()
            found = {name: state for name, state in self.local().items() if self._is_mine(name)}
            changed = [name for name in sorted(found, key=found.__getitem__) if self._pushed.get(name) != found[name]]
            for name in changed:
                self._check()
                if not self.copy(name):
                    del found[name]
            kept = self.local()
            for name in [name for name in self._pushed if name not in kept and self._is_mine(name)]:
                self._check()
                self.store.delete(name)
            self._pushed = found
            if last:
                with self._stamping:
                    self._check()
                    self._stamp(ended=True)
                    self._is_over = True
            return len(changed)

    def try_push(self) -> None:
        """A push whose failure is reported, and made up by the next one."""
        try:
            self.push()
        except OSError as error:
            logger.warning("%s was not copied to %s: %s", self.folder, self.uri, error)

    @contextmanager
    def pushing(self, when_taken: Callable[[], None]) -> Iterator[None]:
        """Push every minute, and at the end; that one raises where it fails. `when_taken`: another session has taken over."""
        with self._renewed():
            try:
                with _repeated(self.try_push, when_taken):
                    yield
            finally:
                try:
                    self.push(last=True)
                except OSError as error:
                    logger.error("%s has what %s lacks: %s; run the same command again", self.folder, self.uri, error)
                    raise

    @contextmanager
    def _renewed(self) -> Iterator[None]:
        """Every minute, however long a push takes."""
        with _repeated(self._renew_or_report, lambda: None):
            yield

    def _renew_or_report(self) -> None:
        try:
            self._renew()
        except OSError as error:
            logger.warning("%s could not be renewed: %s", self.uri, error)

    def _renew(self) -> None:
        with self._stamping:
            if not self._is_over:
                self._check()
                self._stamp()

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
                raise self._in_use(now)

    def _in_use(self, there: dict[str, Any]) -> ValueError:
        return ValueError(f"ray.storage: {self.uri} is in use by {there['who']}; wait for it, or choose another name")

    def _check(self) -> None:
        there = self.store.read_json(self._mark)
        if there is None or there["session"] != self._session:
            raise ValueError(
                f"ray.storage: {self.uri} was taken over by another process; nothing more is written to it"
            )

    def _sessions_here(self) -> tuple[str | None, ...]:
        """Sessions of the store that this working copy is not behind; None is that of an empty store."""
        path = self.folder / STAMP
        if not path.is_file():
            return (None,)
        stored = read_json_object(path)
        return (stored["session"], stored["before"])

    def session_here(self) -> str | None:
        """The last one that this working copy is of; None where it is of none."""
        return self._sessions_here()[0]

    def _note(self, session: str | None, before: str | None) -> None:
        write_text_atomically(self.folder / STAMP, json.dumps({"session": session, "before": before}))

    def _begin(self) -> None:
        self._stamp()
        time.sleep(SETTLE_S)
        now = self.store.read_json(self._mark)
        if now is not None and now["session"] != self._session:
            raise self._in_use(now)

    def _stamp(self, ended: bool = False) -> None:
        content = {"session": self._session, **self._me, "time": 0.0 if ended else time.time()}
        self.store.write(self._mark, json.dumps(content).encode())

    def _is_mine(self, name: str) -> bool:
        """Whether this session pushes a file: a driver leaves alone what it has handed over."""
        above = (self.folder / name).relative_to(self.folder).parents
        return self._mark == WRITER or not any((self.folder / folder / START).is_file() for folder in above)


@contextmanager
def _repeated(action: Callable[[], None], when_taken: Callable[[], None]) -> Iterator[None]:
    """`action` every minute in a thread, until the end or a ValueError."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(PUSH_EVERY_S):
            try:
                action()
            except ValueError as error:
                logger.error("%s", error)
                when_taken()
                return

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
