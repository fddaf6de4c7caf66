"""MLflow as a sink: one parent run per command, one nested child per (method, seed).

metrics.jsonl is the record; what MLflow refuses is reported and never stops a training. The store is tracking.uri, else
MLFLOW_TRACKING_URI, else a sqlite file beside the runs (MLflow's file store is gone), with an absolute artifact location so that
trials do not write into Ray's folders.
"""

import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from aarlib.runtime.run_directory import pending_runs
from aarlib.runtime.storage import storage_folder
from aarlib.training.config import RunConfig, TrackingConfig

logger = logging.getLogger("aarlib")

LONGEST_PARAM = 500
LONG_PARAMS = "long_params.json"
MAX_PROBLEMS = 3
"""After so many refusals a run is no longer logged to MLflow: each may wait for a time-out."""
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"


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


def tracking_uri(config: RunConfig) -> str:
    return _uri(config.tracking, config.ray.storage)


def _uri(settings: TrackingConfig, storage: str | Path) -> str:
    return settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_store(storage)


def _own_store(storage: str | Path) -> str:
    return f"sqlite:///{storage_folder(storage) / 'mlflow.db'}"


def start(config: RunConfig, folder: Path, with_children: bool = True) -> Tracking:
    """Make the experiment and this command's runs; close what dead processes left open. Called by the driver, once."""
    uri = tracking_uri(config)
    problems: list[str] = []
    tracking = _attempt(lambda: _start(config, folder, uri, with_children), problems)
    return tracking or Tracking(uri, "", None, {}, problems=tuple(problems))


def start_trial(config: RunConfig, folder: Path, sweep: Tracking) -> Tracking:
    """The runs of one trial, nested under the sweep's."""
    problems: list[str] = []
    if sweep.parent is None:
        return sweep
    parent = sweep.parent
    children = _attempt(
        lambda: _start_children(_client(sweep.uri), sweep.experiment_id, parent, config, folder), problems
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
        client = _client(tracking.uri)
        for name, run_id in tracking.children.items():
            client.set_terminated(run_id, children.get(name, FAILED))
        if tracking.owns_parent:
            _close_children(client, tracking.experiment_id, parent, stopped)
            _close_abandoned(client, tracking.experiment_id)
        for artifact in artifacts:
            client.log_artifact(parent, str(artifact))
        if tracking.owns_parent:
            client.set_terminated(parent, status)

    _attempt(close, problems)
    return problems


@contextmanager
def single_run(
    settings: TrackingConfig, storage: str | Path, folder: Path, params: Mapping[str, Any]
) -> Iterator["RunLogger"]:
    """One run without children for work that is no RunConfig, named after `folder`; a run that raises ends as FAILED."""
    problems: list[str] = []
    uri = _uri(settings, storage)

    def begin() -> Tracking:
        client = _client(uri)
        experiment_id = _experiment(client, settings, storage)
        _close_abandoned(client, experiment_id)
        run = client.create_run(experiment_id, run_name=settings.run_name or folder.name, tags=_tags(folder, None))
        _log_params(client, run.info.run_id, params)
        return Tracking(uri, experiment_id, run.info.run_id, {folder.name: run.info.run_id})

    tracking = _attempt(begin, problems) or Tracking(uri, "", None, {})
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
            _attempt(lambda: self._log(metrics, step), self.problems)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        self._client = self._client or _client(self.uri)
        now = int(time.time() * 1000)
        self._client.log_batch(
            self.run_id, metrics=[Metric(key, float(value), now, step) for key, value in metrics.items()]
        )


def record_scores(config: RunConfig, folder: Path, scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Metrics of each model (`untouched` or a run's name) onto its child run; returns what went wrong.

    The child is the latest one of `folder`; the untouched model gets a child of the latest parent.
    """
    problems: list[str] = []
    _attempt(lambda: _record_scores(config, folder, scores), problems)
    return problems


def _record_scores(config: RunConfig, folder: Path, scores: Mapping[str, Mapping[str, float]]) -> None:
    from mlflow.entities import Metric

    client = _client(tracking_uri(config))
    experiment_id = _experiment(client, config.tracking, config.ray.storage)
    parent = _latest(client, experiment_id, folder)
    now = int(time.time() * 1000)
    for name, metrics in scores.items():
        run_id = _latest(client, experiment_id, folder / name)
        if run_id is None:
            title = f"{config.tracking.run_name or config.name}/{name}"
            run_id = client.create_run(experiment_id, run_name=title, tags=_tags(folder / name, parent)).info.run_id
            client.set_terminated(run_id, FINISHED)
        client.log_batch(run_id, metrics=[Metric(key, float(value), now, 0) for key, value in metrics.items()])


def _latest(client: Any, experiment_id: str, folder: Path) -> str | None:
    found = client.search_runs(
        [experiment_id], f"tags.`aarlib.folder` = '{folder}'", order_by=["attributes.start_time DESC"], max_results=1
    )
    return found[0].info.run_id if found else None


def _start(config: RunConfig, folder: Path, uri: str, with_children: bool) -> Tracking:
    client = _client(uri)
    experiment_id = _experiment(client, config.tracking, config.ray.storage)
    _close_abandoned(client, experiment_id)
    name = config.tracking.run_name or config.name
    parent = client.create_run(experiment_id, run_name=name, tags=_tags(folder, None)).info.run_id
    for name in ("config.json", "data.json"):
        if (folder / name).is_file():
            client.log_artifact(parent, str(folder / name))
    _log_params(client, parent, config.model_dump(mode="json", exclude={"method", "seeds"}))
    children = _start_children(client, experiment_id, parent, config, folder) if with_children else {}
    return Tracking(uri, experiment_id, parent, children)


def _start_children(client: Any, experiment_id: str, parent: str, config: RunConfig, folder: Path) -> dict[str, str]:
    children: dict[str, str] = {}
    for run in pending_runs(folder, config):
        tags = _tags(folder / run.name, parent)
        child = client.create_run(experiment_id, run_name=f"{folder.name}/{run.name}", tags=tags).info.run_id
        _log_params(client, child, {"label": run.label, "seed": run.seed, **run.method.model_dump(mode="json")})
        children[run.name] = child
    return children


def _client(uri: str) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def _experiment(client: Any, settings: TrackingConfig, storage: str | Path) -> str:
    found = client.get_experiment_by_name(settings.experiment)
    if found is not None:
        return found.experiment_id
    location = None
    if _uri(settings, storage) == _own_store(storage):
        location = (storage_folder(storage) / "mlflow_artifacts").as_uri()
    return client.create_experiment(settings.experiment, artifact_location=location)


def _tags(folder: Path, parent: str | None) -> dict[str, str]:
    process = psutil.Process()
    tags = {
        "aarlib.folder": str(folder),
        "aarlib.host": socket.gethostname(),
        "aarlib.pid": str(process.pid),
        "aarlib.process_started": str(process.create_time()),
    }
    return tags if parent is None else {**tags, "mlflow.parentRunId": parent}


def _close_abandoned(client: Any, experiment_id: str) -> None:
    """Runs of this host still marked RUNNING whose process is gone."""
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000):
        tags = run.data.tags
        if tags.get("aarlib.host") == socket.gethostname() and not _alive(tags):
            client.set_terminated(run.info.run_id, FAILED)


def _close_children(client: Any, experiment_id: str, parent: str, stopped: Collection[Path]) -> None:
    """Trials that a scheduler stopped had no chance to end their runs, or ended them as failed on the way out."""
    folders = {str(folder) for folder in stopped}
    for run in client.search_runs([experiment_id], f"tags.mlflow.parentRunId = '{parent}'", max_results=1000):
        folder = run.data.tags.get("aarlib.folder")
        if folder is None or run.info.status == FINISHED:
            continue
        if run.info.status == "RUNNING" or str(Path(folder).parent) in folders:
            client.set_terminated(run.info.run_id, KILLED)


def _alive(tags: Mapping[str, str]) -> bool:
    try:
        process = psutil.Process(int(tags["aarlib.pid"]))
        return abs(process.create_time() - float(tags["aarlib.process_started"])) < 1
    except psutil.NoSuchProcess:
        return False


def _log_params(client: Any, run_id: str, values: Mapping[str, Any]) -> None:
    """Flat parameters; of one that is too long for MLflow the hash, and the whole in the artefact long_params.json."""
    from mlflow.entities import Param

    flat = dict(_flat(values))
    long = {key: text for key, text in flat.items() if len(text) > LONGEST_PARAM}
    short = {key: f"sha256 {hashlib.sha256(text.encode()).hexdigest()}" for key, text in long.items()}
    client.log_batch(run_id, params=[Param(key, text) for key, text in {**flat, **short}.items()])
    if long:
        client.log_text(run_id, json.dumps(long, indent=2), LONG_PARAMS)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
    return pairs


def _attempt(action: Callable[[], Any], problems: list[str]) -> Any:
    """Run `action`; what MLflow, its store or the network raise becomes a warning and a line in `problems`."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        return action()
    except (MlflowException, SQLAlchemyError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        problems.append(first)
        logger.warning("MLflow: %s; training goes on, metrics.jsonl has the record", first)
        return None
