"""MLflow as a sink: one parent run per command, one nested child per (method, seed).

metrics.jsonl is the record; what MLflow refuses is reported and never stops a training.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aarlib.runtime.mlflow_store import (
    FAILED,
    FINISHED,
    KILLED,
    attempt,
    client_of,
    close_abandoned,
    experiment_id_of,
    log_params,
    run_tags,
    store_uri,
    tracking_uri,
)
from aarlib.runtime.run_directory import pending_runs
from aarlib.training.config import RunConfig, TrackingConfig

MAX_PROBLEMS = 3
"""After so many refusals a run is no longer logged to MLflow: each may wait for a time-out."""


class Tracking(NamedTuple):
    """Where to log; picklable. `parent` None: MLflow could not be reached at the start."""

    uri: str
    experiment_id: str
    parent: str | None
    children: dict[str, str]
    """Run ids by `Run.name`."""
    owns_parent: bool = True
    problems: tuple[str, ...] = ()

    def ui_command(self) -> str:
        return f"mlflow ui --backend-store-uri {self.uri} --host 127.0.0.1 --port 5000"


def start(config: RunConfig, folder: Path, with_children: bool = True) -> Tracking:
    """Make the experiment and this command's runs; close what dead processes left open. Called by the driver, once."""
    uri = tracking_uri(config)
    problems: list[str] = []
    tracking = attempt(lambda: _start(config, folder, uri, with_children), problems)
    return tracking or Tracking(uri, "", None, {}, problems=tuple(problems))


def start_trial(config: RunConfig, folder: Path, sweep: Tracking) -> Tracking:
    """The runs of one trial, nested under the sweep's."""
    problems: list[str] = []
    if sweep.parent is None:
        return sweep
    parent = sweep.parent
    children = attempt(
        lambda: _start_children(client_of(sweep.uri), sweep.experiment_id, parent, config, folder), problems
    )
    return sweep._replace(children=children or {}, owns_parent=False, problems=tuple(problems))


def finish(
    tracking: Tracking,
    status: str,
    children: Mapping[str, str],
    artifacts: tuple[Path, ...] = (),
    stopped: Collection[Path] = (),
) -> list[str]:
    """End the children with their status (FINISHED or FAILED) and the parent with `status`; returns what went wrong.

    `stopped`: run directories of trials that a scheduler ended, whose runs that did not finish are KILLED.
    """
    problems: list[str] = []
    if tracking.parent is None:
        return problems
    parent = tracking.parent

    def close() -> None:
        client = client_of(tracking.uri)
        for name, run_id in tracking.children.items():
            client.set_terminated(run_id, children.get(name, FAILED))
        if tracking.owns_parent:
            _close_children(client, tracking.experiment_id, parent, stopped)
            close_abandoned(client, tracking.experiment_id)
        for artifact in artifacts:
            client.log_artifact(parent, str(artifact))
        if tracking.owns_parent:
            client.set_terminated(parent, status)

    attempt(close, problems)
    return problems


@contextmanager
def single_run(
    settings: TrackingConfig, storage: str | Path, folder: Path, params: Mapping[str, Any]
) -> Iterator["RunLogger"]:
    """One run without children for work that is no RunConfig, named after `folder`; a run that raises ends as FAILED."""
    problems: list[str] = []
    uri = store_uri(settings, storage)

    def begin() -> Tracking:
        client = client_of(uri)
        experiment_id = experiment_id_of(client, settings, storage)
        close_abandoned(client, experiment_id)
        run = client.create_run(experiment_id, run_name=settings.run_name or folder.name, tags=run_tags(folder, None))
        log_params(client, run.info.run_id, params)
        return Tracking(uri, experiment_id, run.info.run_id, {folder.name: run.info.run_id})

    tracking = attempt(begin, problems) or Tracking(uri, "", None, {})
    status = FAILED
    try:
        yield RunLogger(tracking, folder.name)
        status = FINISHED
    finally:
        finish(tracking, status, {folder.name: status})


class RunLogger:
    """Metrics of one child run, from rank 0 of its workers."""

    def __init__(self, tracking: Tracking, name: str) -> None:
        self.uri, self.run_id = tracking.uri, tracking.children.get(name)
        self.problems: list[str] = []
        self._client: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if self.run_id is not None and len(self.problems) < MAX_PROBLEMS:
            attempt(lambda: self._log(metrics, step), self.problems)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        self._client = self._client or client_of(self.uri)
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id, metrics=[Metric(key, float(value), now, step) for key, value in metrics.items()]
        )


def record_scores(config: RunConfig, folder: Path, scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Metrics of each model (`untouched` or a run's name) onto its child run; returns what went wrong.

    The child is the latest one of `folder`; the untouched model gets a child of the latest parent.
    """
    problems: list[str] = []
    attempt(lambda: _record_scores(config, folder, scores), problems)
    return problems


def _record_scores(config: RunConfig, folder: Path, scores: Mapping[str, Mapping[str, float]]) -> None:
    from mlflow.entities import Metric

    client = client_of(tracking_uri(config))
    experiment_id = experiment_id_of(client, config.tracking, config.ray.storage)
    parent = _latest(client, experiment_id, folder)
    now = int(time.time() * 1000)
    for name, metrics in scores.items():
        run_id = _latest(client, experiment_id, folder / name)
        if run_id is None:
            title = f"{config.tracking.run_name or config.name}/{name}"
            run_id = client.create_run(experiment_id, run_name=title, tags=run_tags(folder / name, parent)).info.run_id
            client.set_terminated(run_id, FINISHED)
        client.log_batch(run_id, metrics=[Metric(key, float(value), now, 0) for key, value in metrics.items()])


def _latest(client: Any, experiment_id: str, folder: Path) -> str | None:
    found = client.search_runs(
        [experiment_id], f"tags.`aarlib.folder` = '{folder}'", order_by=["attributes.start_time DESC"], max_results=1
    )
    return found[0].info.run_id if found else None


def _start(config: RunConfig, folder: Path, uri: str, with_children: bool) -> Tracking:
    client = client_of(uri)
    experiment_id = experiment_id_of(client, config.tracking, config.ray.storage)
    close_abandoned(client, experiment_id)
    name = config.tracking.run_name or config.name
    parent = client.create_run(experiment_id, run_name=name, tags=run_tags(folder, None)).info.run_id
    for name in ("config.json", "data.json"):
        if (folder / name).is_file():
            client.log_artifact(parent, str(folder / name))
    log_params(client, parent, config.model_dump(mode="json", exclude={"method", "seeds"}))
    children = _start_children(client, experiment_id, parent, config, folder) if with_children else {}
    return Tracking(uri, experiment_id, parent, children)


def _start_children(client: Any, experiment_id: str, parent: str, config: RunConfig, folder: Path) -> dict[str, str]:
    children: dict[str, str] = {}
    for run in pending_runs(folder, config):
        tags = run_tags(folder / run.name, parent)
        child = client.create_run(experiment_id, run_name=f"{folder.name}/{run.name}", tags=tags).info.run_id
        log_params(client, child, {"label": run.label, "seed": run.seed, **run.method.model_dump(mode="json")})
        children[run.name] = child
    return children


def _close_children(client: Any, experiment_id: str, parent: str, stopped: Collection[Path]) -> None:
    """Trials that a scheduler stopped had no chance to end their runs, or ended them as failed on the way out."""
    folders = {str(folder) for folder in stopped}
    for run in client.search_runs([experiment_id], f"tags.mlflow.parentRunId = '{parent}'", max_results=1000):
        folder = run.data.tags.get("aarlib.folder")
        if folder is None or run.info.status == FINISHED:
            continue
        if run.info.status == "RUNNING" or str(Path(folder).parent) in folders:
            client.set_terminated(run.info.run_id, KILLED)
