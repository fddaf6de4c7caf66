"""The one fan-out: actors that hold a model each work through idempotent units, one parquet part per finished unit."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pandas as pd
import ray
from ray.exceptions import RayActorError, RayTaskError

from aarlib.runtime.unit_parts import Unit, check_units, claim_parts, manifest_of, part_path, write_part

logger = logging.getLogger("aarlib")

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
    check_units(units)
    claim_parts(out_dir, manifest_of(units, worker, settings))
    pending = [unit for unit in units if not part_path(out_dir, unit["id"]).is_file()]
    logger.info("%s: %d of %d already finished", label, len(units) - len(pending), len(units))
    progress = _Progress(label, len(units), len(pending))

    def store(unit_id: str, frame: pd.DataFrame) -> None:
        write_part(frame, part_path(out_dir, unit_id))
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
