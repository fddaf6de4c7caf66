"""The one fan-out: actors that hold a model each work through idempotent units, one parquet part per finished unit."""

import hashlib
import json
import logging
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import pandas as pd
import ray
from ray.exceptions import RayActorError, RayTaskError

from aarlib.config import write_text_atomically

logger = logging.getLogger("aarlib")

Unit = Mapping[str, Any]
"""A JSON-able mapping with a unique, non-empty string under `id`."""


Store = Callable[[str, pd.DataFrame], None]
STALL_WARNING_S = 120
LOADING = "(loading)"
MAX_SHOWN = 5


class Worker(Protocol):
    """Importable, constructed once per actor from JSON-able settings; loads its own model from name and revision."""

    def __call__(self, unit: Unit) -> pd.DataFrame: ...


class Resources(NamedTuple):
    """What one actor holds, and the variables its process is started with."""

    cpus: float = 1
    gpus: float = 0
    environment: Mapping[str, str] = {}


ONE_CPU = Resources()


class UnitsError(RuntimeError):
    """Units that failed after every other unit was finished and stored; names each and why."""


def run_units(
    units: Sequence[Unit],
    worker: Callable[..., Worker],
    out_dir: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    place: Mapping[str, Any] | None = None,
    num_actors: int = 1,
    resources: Resources = ONE_CPU,
    max_deaths: int = 2,
    label: str = "units",
) -> pd.DataFrame:
    """Run every unit without a part file in `out_dir`; all parts in the order of `units`, with a column `unit`.

    The worker is made with `settings`, which identify the work, and `place`, which may be another the next time. A unit whose
    actor dies is run again on a new actor, at most `max_deaths` times. A unit that raises does not stop the others; UnitsError
    names it at the end. A folder made from other units or settings is refused. Ray must be initialised.
    """
    settings = dict(settings or {})
    out_dir = Path(out_dir)
    units = [dict(unit) for unit in units]
    _check_units(units)
    _claim(out_dir, _manifest(units, worker, settings))
    pending = [unit for unit in units if not part_path(out_dir, unit["id"]).is_file()]
    logger.info("%s: %d of %d already finished", label, len(units) - len(pending), len(units))
    progress = _Progress(label, len(units), len(pending))

    def store(unit_id: str, frame: pd.DataFrame) -> None:
        _write_part(frame, part_path(out_dir, unit_id))
        progress.finished(unit_id)

    if pending:
        dispatcher = _Dispatcher(worker, {**settings, **(place or {})}, resources, max_deaths, store)
        failures = dispatcher.run(pending, _fitting_actors(min(num_actors, len(pending)), resources))
        if failures:
            reasons = [f"unit {identity!r}: {reason}" for identity, reason in failures.items()]
            shown = "; ".join(reasons[:MAX_SHOWN]) + ("; ..." if len(reasons) > MAX_SHOWN else "")
            raise UnitsError(f"{len(failures)} of {len(units)} units failed, the others are stored. {shown}")
    parts = [pd.read_parquet(part_path(out_dir, unit["id"])).assign(unit=unit["id"]) for unit in units]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def part_path(out_dir: str | Path, unit_id: str) -> Path:
    """The part file of a unit: a readable, bounded name made unique by a hash of the whole id."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", unit_id)[:80]
    return Path(out_dir) / "parts" / f"{readable}.{hashlib.sha256(unit_id.encode()).hexdigest()[:12]}.parquet"


def _check_units(units: Sequence[Unit]) -> None:
    ids = [unit.get("id") for unit in units]
    bad = [identity for identity in ids if not isinstance(identity, str) or not identity]
    if bad:
        raise ValueError(f"unit id {bad[0]!r} is not a non-empty string; give every unit a unique 'id'")
    twice = sorted(str(identity) for identity, count in Counter(ids).items() if count > 1)
    if twice:
        raise ValueError(f"unit ids {twice[:3]} occur more than once; give every unit a unique 'id'")


def _manifest(units: Sequence[Unit], worker: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    name = f"{worker.__module__}:{worker.__qualname__}"
    if worker.__module__ == "__main__" or "<locals>" in worker.__qualname__:
        raise ValueError(f"worker {name} cannot be imported by an actor; define it at the top level of a module")
    try:
        return json.loads(json.dumps({"worker": name, "settings": settings, "units": list(units)}))
    except TypeError as error:
        raise ValueError(f"units and settings must be JSON-able: {error}") from None


def _claim(out_dir: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or compare it with the one that is there."""
    path = out_dir / "manifest.json"
    (out_dir / "parts").mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        write_text_atomically(path, json.dumps(manifest, indent=1))
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    differences = _differences(found, manifest)
    if differences:
        raise ValueError(
            f"{out_dir} holds the parts of other work: {'; '.join(differences)}. "
            "Choose another folder, or move this one away"
        )


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    differences = []
    if found["worker"] != wanted["worker"]:
        differences.append(f"worker {found['worker']}, now {wanted['worker']}")
    for key in sorted(found["settings"].keys() | wanted["settings"].keys()):
        before, now = found["settings"].get(key), wanted["settings"].get(key)
        if before != now:
            differences.append(f"setting {key} = {before!r}, now {now!r}")
    before, now = ({unit["id"]: unit for unit in side["units"]} for side in (found, wanted))
    for what, ids in (
        ("units no longer asked for", [i for i in before if i not in now]),
        ("new units", [i for i in now if i not in before]),
        ("changed units", [i for i in now if i in before and now[i] != before[i]]),
    ):
        if ids:
            differences.append(f"{len(ids)} {what} ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})")
    return differences


def _fitting_actors(wanted: int, resources: Resources) -> int:
    """How many of `wanted` actors the cluster holds; none at all is an error that names the resource."""
    total = ray.cluster_resources()
    fits = wanted
    for name, needed in (("CPU", resources.cpus), ("GPU", resources.gpus)):
        if needed > total.get(name, 0):
            raise ValueError(
                f"one actor needs {needed:g} {name} and the cluster has {total.get(name, 0):g}; lower it or add nodes"
            )
        if needed:
            fits = min(fits, int(total.get(name, 0) / needed + 1e-9))
    if fits < wanted:
        logger.warning("the cluster holds %d of the %d actors asked for; going on with %d", fits, wanted, fits)
    return fits


class _Actor:
    """`start` loads, so that an error there arrives as itself and not as the death of an actor."""

    def start(self, worker: Callable[..., Worker], settings: dict[str, Any]) -> None:
        self._worker = worker(**settings)

    def run(self, unit: dict[str, Any]) -> pd.DataFrame:
        return self._worker(unit)


class _Task(NamedTuple):
    """What an actor is busy with; without a unit it is loading."""

    actor: Any
    unit: dict[str, Any] | None


class _Dispatcher:
    """Hands units to actors, one at a time each, and stores what comes back."""

    def __init__(
        self,
        worker: Callable[..., Worker],
        settings: dict[str, Any],
        resources: Resources,
        max_deaths: int,
        store: Store,
    ):
        self._worker, self._settings, self._resources = worker, settings, resources
        self._max_deaths, self._store = max_deaths, store
        self._queue: deque[dict[str, Any]] = deque()
        self._actors, self._idle = list[Any](), list[Any]()
        self._running: dict[Any, _Task] = {}
        self._deaths: Counter[str] = Counter()
        self._failures: dict[str, str] = {}

    def run(self, units: list[dict[str, Any]], num_actors: int) -> dict[str, str]:
        """Work through `units`; returns why each failed unit did."""
        self._queue.extend(units)
        try:
            for _ in range(num_actors):
                self._launch()
            while self._running:
                ready, _ = ray.wait(list(self._running), num_returns=1, timeout=STALL_WARNING_S)
                if ready:
                    self._collect(ready[0], self._running.pop(ready[0]))
                else:
                    self._report_stall()
        finally:
            for actor in self._actors:
                ray.kill(actor)
        return self._failures

    def _launch(self) -> None:
        cpus, gpus, environment = self._resources
        remote: Any = ray.remote(_Actor)
        options = {"num_cpus": cpus, "num_gpus": gpus, "runtime_env": {"env_vars": dict(environment)}}
        actor = remote.options(max_restarts=0, **options).remote()
        self._actors.append(actor)
        self._running[actor.start.remote(self._worker, self._settings)] = _Task(actor, None)

    def _collect(self, reference: Any, task: _Task) -> None:
        try:
            result: Any = ray.get(reference)
        except RayActorError as error:
            self._after_death(task.unit, error)
            return
        except RayTaskError as error:
            if task.unit is None:
                raise error.as_instanceof_cause() from None
            logger.error("unit %r failed:\n%s", task.unit["id"], error)
            self._failures[task.unit["id"]] = f"{type(error.cause).__name__}: {error.cause}"
        else:
            if task.unit is not None:
                self._store(task.unit["id"], result)
        self._idle.append(task.actor)
        self._assign()

    def _assign(self) -> None:
        while self._queue and self._idle:
            actor, unit = self._idle.pop(), self._queue.popleft()
            self._running[actor.run.remote(unit)] = _Task(actor, unit)

    def _after_death(self, unit: dict[str, Any] | None, error: RayActorError) -> None:
        identity = LOADING if unit is None else unit["id"]
        self._deaths[identity] += 1
        logger.warning(
            "actor died during %r (death %d, %d allowed)", identity, self._deaths[identity], self._max_deaths
        )
        if self._deaths[identity] > self._max_deaths:
            if unit is None:
                raise UnitsError(f"actors died while loading, {self._deaths[identity]} times: {error}") from error
            self._failures[identity] = f"its actor died {self._deaths[identity]} times: {error}"
        elif unit is not None:
            self._queue.appendleft(unit)
        self._assign()
        if self._queue:
            self._launch()

    def _report_stall(self) -> None:
        busy = [LOADING if task.unit is None else task.unit["id"] for task in self._running.values()]
        logger.info(
            "still running after %d s: %s; free: %s", STALL_WARNING_S, ", ".join(busy), ray.available_resources()
        )


class _Progress:
    def __init__(self, label: str, total: int, pending: int):
        self._label, self._total, self._left = label, total, pending
        self._done_here, self._start = 0, time.monotonic()

    def finished(self, unit_id: str) -> None:
        self._done_here += 1
        self._left -= 1
        elapsed = time.monotonic() - self._start
        eta = elapsed / self._done_here * self._left
        done = self._total - self._left
        logger.info("%s: %d/%d, %.0f s, about %.0f s left (%s)", self._label, done, self._total, elapsed, eta, unit_id)


def _write_part(frame: pd.DataFrame, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    frame.to_parquet(temporary, index=False)
    os.replace(temporary, path)
