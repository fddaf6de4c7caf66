"""MLflow as a sink: nested runs, runs of dead processes closed, refusals reported and survived."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from aarlib.runtime import tracking
from aarlib.runtime.run_directory import claim
from aarlib.training.config import RunConfig

pytest.importorskip("mlflow")


def config(storage: Path, **changes: object) -> RunConfig:
    base = RunConfig.from_mapping(
        {
            "name": "run",
            "data": {"train": ["nano:sft:10", "x" * 600]},
            "method": {"sft": {"name": "router_sft"}, "aar": {"name": "aar", "layers": [1], "window": 4}},
            "optim": {"global_batch": 4, "micro_batch": 1},
            "ray": {"storage": str(storage)},
        }
    )
    return base.updated(changes)


def test_parent_children_metrics_and_abandoned_runs(tmp_path: Path) -> None:
    settings = config(tmp_path)
    folder = claim(settings)
    first = tracking.start(settings, folder)
    assert first.parent is not None and not first.problems
    client = tracking._client(first.uri)
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    tags = {
        "aarlib.host": socket.gethostname(),
        "aarlib.pid": gone.stdout.decode().strip(),
        "aarlib.process_started": "0",
    }
    abandoned = client.create_run(first.experiment_id, tags=tags).info.run_id

    log = tracking.RunLogger(first, "aar-seed0")
    log.log({"train/ce": 2.5}, step=3)
    assert not log.problems
    second = tracking.start(settings.updated({"tracking.run_name": "again"}), folder)
    assert client.get_run(abandoned).info.status == "FAILED"
    assert client.get_run(first.parent).info.status == "RUNNING"

    assert tracking.finish(first, tracking.FINISHED, {"aar-seed0": tracking.FINISHED}) == []
    child = client.get_run(first.children["aar-seed0"])
    assert child.data.tags["mlflow.parentRunId"] == first.parent
    assert child.data.metrics == {"train/ce": 2.5}
    assert child.data.params["window"] == "4"
    assert child.info.status == "FINISHED"
    assert client.get_run(first.children["sft-seed0"]).info.status == "FAILED"
    parent = client.get_run(first.parent)
    assert parent.data.params["optim.global_batch"] == "4"
    assert "data.train" not in parent.data.params
    assert [file.path for file in client.list_artifacts(first.parent)] == ["config.json"]
    assert str(tmp_path) in parent.info.artifact_uri

    trial = tracking.start_trial(settings, folder, second)
    assert client.get_run(trial.children["aar-seed0"]).data.tags["mlflow.parentRunId"] == second.parent
    tracking.finish(trial, tracking.FINISHED, {})
    assert client.get_run(second.parent).info.status == "RUNNING"


def test_refusals_are_reported_and_do_not_raise(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"tracking.uri": "nosuchstore://x"})
    started = tracking.start(settings, claim(settings))
    assert started.parent is None
    assert "nosuchstore" in started.problems[0]
    assert tracking.finish(started, tracking.FINISHED, {}) == []
    broken = tracking.RunLogger(started._replace(children={"aar-seed0": "x"}), "aar-seed0")
    for step in range(5):
        broken.log({"train/ce": 1.0}, step)
    assert len(broken.problems) == tracking.MAX_PROBLEMS
