"""The run directory: who owns it, what is finished, and how histories are appended and cut back."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

from aarlib.config import read_json_object, write_text_atomically
from aarlib.runtime import handover
from aarlib.runtime.storage import LOCK, is_uri, storage_folder
from aarlib.training.config import Run, RunConfig

MAY_DIFFER = ("ray", "tracking", "evaluate")
"""Tables that do not change what a training computes, so a run can be resumed with other values."""


class HasStorage(Protocol):
    @property
    def storage(self) -> str: ...


class Claimant(Protocol):
    """A config with a run directory of its own: RunConfig, and those of audit, lens and study."""

    @property
    def name(self) -> str: ...

    @property
    def ray(self) -> HasStorage: ...

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], origin: str = "config") -> Self: ...

    def model_dump(self, *, mode: str) -> dict[str, Any]: ...

    def to_json(self) -> str: ...


def run_directory(config: Claimant) -> Path:
    """On this machine; where `ray.storage` is a URI, the working copy."""
    return storage_folder(config.ray.storage) / config.name


def update(config: Claimant) -> Path:
    """The run directory, as the store has it where `ray.storage` is a URI; a ValueError where it is another run's."""
    handover.update(config.ray.storage, config.name)
    check_claim(config)
    return run_directory(config)


def check_claim(config: Claimant) -> None:
    """A ValueError where the run directory exists and is another run's."""
    folder = run_directory(config)
    stored = folder / "config.json"
    if stored.is_file():
        differences = _differences(_stored(stored, type(config)), config.model_dump(mode="json"))
        if differences:
            raise ValueError(
                f"name = {config.name!r}: the run directory {folder} exists with another config ({'; '.join(differences)}); "
                "choose another name, or remove the directory"
            )
    elif not is_uri(config.ray.storage) and folder.exists() and any(path.name[0] != "." for path in folder.iterdir()):
        raise ValueError(f"name = {config.name!r}: {folder} exists and is no run directory; choose another name")


def claim(config: Claimant) -> Path:
    """The run directory: made, or taken up again where it holds the same config."""
    check_claim(config)
    folder = run_directory(config)
    write_text_atomically(folder / "config.json", config.to_json())
    return folder


@contextmanager
def held(config: Claimant) -> Iterator[Path]:
    """The run directory, held by this process alone; the lock ends with the process, however it ends."""
    folder = run_directory(config)
    if not is_uri(config.ray.storage):
        check_claim(config)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ValueError(
                f"name = {config.name!r}: {folder} is in use by {lock.read().strip()}; wait for it, or choose another name"
            ) from None
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}")
        lock.flush()
        with handover.kept_up(config.ray.storage, config.name):
            check_claim(config)
            yield folder


def is_finished(folder: Path, run: Run) -> bool:
    return (folder / run.name / "result.json").is_file()


def pending_runs(folder: Path, config: RunConfig) -> list[Run]:
    return [run for run in config.runs() if not is_finished(folder, run)]


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def cut_history(path: Path, steps: int) -> None:
    """Keep the lines of the first `steps` steps: what a crash left behind the last checkpoint is trained again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        if json.loads(line)["step"] < steps:
            kept.append(line)
    write_text_atomically(path, "".join(kept))


def _stored(path: Path, kind: type[Claimant]) -> dict[str, Any]:
    """The config of a run directory, fields added since it was written at their defaults."""
    values = read_json_object(path)
    try:
        return kind.from_mapping(values).model_dump(mode="json")
    except ValueError:
        return values


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for table in sorted({*old, *new} - set(MAY_DIFFER)):
        before, after = _flat(old.get(table), table), _flat(new.get(table), table)
        for path in sorted({*before, *after}):
            if before.get(path) != after.get(path):
                found.append(f"{path}: {before.get(path)!r} there, {after.get(path)!r} here")
    return found


def _flat(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    return {key: leaf for name, item in value.items() for key, leaf in _flat(item, f"{path}.{name}").items()}
