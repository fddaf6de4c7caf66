"""What a driver does with a run whose `ray.storage` is a URI: hold it, hand it to its workers, take it back."""

import fcntl
import logging
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

from aarlib.config import write_text_atomically
from aarlib.runtime.mirror import STAMP, Mirror
from aarlib.runtime.storage import LOCK, WRITER_LOCK, is_uri, sole_writer, storage_folder
from aarlib.runtime.working_copy import START

logger = logging.getLogger("aarlib")


@contextmanager
def kept_up(storage: str, name: str) -> Iterator[None]:
    """Hold the run in the store and push its working copy; nothing where `storage` is a folder."""
    if not is_uri(storage):
        yield
        return
    mirror = Mirror(storage, name)
    with _reached(mirror), sole_writer(mirror.folder):
        mirror.open()
    with mirror.pushing(when_taken=_interrupt_main):
        yield
    logger.info("%s is copied to %s", mirror.folder, mirror.uri)


def update(storage: str, name: str) -> None:
    """The working copy as the store has it; nothing where `storage` is a folder, or a process of this machine writes the copy."""
    if not is_uri(storage):
        return
    mirror = Mirror(storage, name)
    mirror.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks, _reached(mirror):
        for lock in (LOCK, WRITER_LOCK):
            file = locks.enter_context((mirror.folder / lock).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        mirror.update()


def hand_over(storage: str, name: str) -> str:
    """Give the run's files to a worker group; the token by which the group recognises its driver's folder."""
    token, folder = uuid.uuid4().hex, storage_folder(storage) / name
    if not is_uri(storage):
        write_text_atomically(folder / START, token)
        return token
    _check_held(storage, name)
    with sole_writer(folder):
        Mirror(storage, name).hand_over(token)
    return token


def _check_held(storage: str, name: str) -> None:
    """A ValueError where another driver has taken over the run, or the sweep that holds this trial."""
    for above in (PurePosixPath(name), *PurePosixPath(name).parents):
        mirror = Mirror(storage, above.as_posix())
        if above.name and (here := mirror.session_here()) is not None:
            there = mirror.store.read_json(STAMP)
            if there is None or there["session"] != here:
                raise ValueError(f"ray.storage: {mirror.uri} was taken over by another process")


@contextmanager
def collected(storage: str, name: str, token: str) -> Iterator[None]:
    """What the worker group of `token` wrote is in the driver's folder behind it, however it ends."""
    if not is_uri(storage):
        yield
        return
    mirror = Mirror(storage, name)
    try:
        yield
    except BaseException:
        try:
            with sole_writer(mirror.folder):
                mirror.collect(token)
        except OSError as error:
            logger.error("%s has what %s lacks: %s; run the same command again", mirror.uri, mirror.folder, error)
        raise
    with sole_writer(mirror.folder):
        mirror.collect(token)


@contextmanager
def _reached(mirror: Mirror) -> Iterator[None]:
    """A store that refuses at the start is a wrong setting; later it is a failure."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"ray.storage: {mirror.uri} cannot be reached: {str(error).splitlines()[0]}; check URI, network and credentials"
        ) from error


def _interrupt_main() -> None:
    """As Ctrl-C does: work whose results nothing keeps is not gone on with."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
