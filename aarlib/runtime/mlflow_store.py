"""The MLflow store: where it is, its experiment, the tags and parameters of a run, and what to do when it refuses.

It is tracking.uri, else MLFLOW_TRACKING_URI, else a sqlite file beside the runs (MLflow's file store is gone), with an absolute
artifact location so that trials do not write into Ray's folders.
"""

import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from aarlib.runtime.storage import storage_folder
from aarlib.training.config import RunConfig, TrackingConfig

logger = logging.getLogger("aarlib")

LONGEST_PARAM = 500
LONG_PARAMS = "long_params.json"
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"


def tracking_uri(config: RunConfig) -> str:
    return store_uri(config.tracking, config.ray.storage)


def store_uri(settings: TrackingConfig, storage: str | Path) -> str:
    return settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or _own_store(storage)


def _own_store(storage: str | Path) -> str:
    return f"sqlite:///{storage_folder(storage) / 'mlflow.db'}"


def client_of(uri: str) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri)


def experiment_id_of(client: Any, settings: TrackingConfig, storage: str | Path) -> str:
    found = client.get_experiment_by_name(settings.experiment)
    if found is not None:
        return found.experiment_id
    location = None
    if store_uri(settings, storage) == _own_store(storage):
        location = (storage_folder(storage) / "mlflow_artifacts").as_uri()
    return client.create_experiment(settings.experiment, artifact_location=location)


def run_tags(folder: Path, parent: str | None) -> dict[str, str]:
    process = psutil.Process()
    tags = {
        "aarlib.folder": str(folder),
        "aarlib.host": socket.gethostname(),
        "aarlib.pid": str(process.pid),
        "aarlib.process_started": str(process.create_time()),
    }
    return tags if parent is None else {**tags, "mlflow.parentRunId": parent}


def close_abandoned(client: Any, experiment_id: str) -> None:
    """Runs of this host still marked RUNNING whose process is gone."""
    for run in client.search_runs([experiment_id], "attributes.status = 'RUNNING'", max_results=1000):
        tags = run.data.tags
        if tags.get("aarlib.host") == socket.gethostname() and not _alive(tags):
            client.set_terminated(run.info.run_id, FAILED)


def _alive(tags: Mapping[str, str]) -> bool:
    try:
        process = psutil.Process(int(tags["aarlib.pid"]))
        return abs(process.create_time() - float(tags["aarlib.process_started"])) < 1
    except psutil.NoSuchProcess:
        return False


def log_params(client: Any, run_id: str, values: Mapping[str, Any]) -> None:
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


def attempt(action: Callable[[], Any], problems: list[str]) -> Any:
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
