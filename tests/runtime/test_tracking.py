"""MLflow as a sink: nested runs, runs of dead processes closed, refusals reported and survived."""

import math
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aarlib.runtime import tracking
from aarlib.runtime.mlflow_store import FAILED, FINISHED, client_of, tracking_uri
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
    client = client_of(first.uri)
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

    assert tracking.finish(first, FINISHED, {"aar-seed0": FINISHED}) == []
    child = client.get_run(first.children["aar-seed0"])
    assert child.data.tags["mlflow.parentRunId"] == first.parent
    assert child.data.metrics == {"train/ce": 2.5}
    assert child.data.params["window"] == "4"
    assert child.info.status == "FINISHED"
    assert client.get_run(first.children["sft-seed0"]).info.status == "FAILED"
    parent = client.get_run(first.parent)
    assert parent.data.params["optim.global_batch"] == "4"
    assert parent.data.params["data.train"].startswith("sha256 ") and len(parent.data.params["data.train"]) == 71
    assert [file.path for file in client.list_artifacts(first.parent)] == ["config.json", "long_params.json"]
    assert "x" * 600 in (artifact(first.uri, first.parent) / "long_params.json").read_text()
    assert str(tmp_path) in parent.info.artifact_uri

    trial = tracking.start_trial(settings, folder, second)
    assert client.get_run(trial.children["aar-seed0"]).data.tags["mlflow.parentRunId"] == second.parent
    tracking.finish(trial, FINISHED, {})
    assert client.get_run(second.parent).info.status == "RUNNING"

    stopped = claim(settings.updated({"name": "run/trials/00001"}))
    cut = tracking.start_trial(settings, stopped, second)
    tracking.finish(cut, FAILED, {"sft-seed0": FINISHED})
    orphan = client.create_run(first.experiment_id, tags=tags).info.run_id
    somebodys = client.create_run(first.experiment_id, tags={"mlflow.parentRunId": second.parent}).info.run_id
    assert tracking.finish(second, FINISHED, {}, stopped=[stopped]) == []
    statuses = [client.get_run(cut.children[name]).info.status for name in ("sft-seed0", "aar-seed0")]
    assert statuses == ["FINISHED", "KILLED"]
    assert client.get_run(trial.children["aar-seed0"]).info.status == "FAILED"
    assert client.get_run(orphan).info.status == "FAILED"
    assert client.get_run(somebodys).info.status == "RUNNING"


def test_the_store_is_the_configs_then_the_environments_then_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    own = tracking_uri(settings)
    assert own == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/theirs.db")
    explicit = settings.updated({"tracking.uri": f"sqlite:///{tmp_path}/explicit.db"})
    assert tracking_uri(explicit) == f"sqlite:///{tmp_path}/explicit.db"
    started = tracking.start(settings, claim(settings))
    assert started.parent is not None and started.uri == f"sqlite:///{tmp_path}/theirs.db"
    assert (tmp_path / "theirs.db").is_file() and not (tmp_path / "runs" / "mlflow.db").exists()
    location = client_of(started.uri).get_experiment(started.experiment_id).artifact_location
    assert str(tmp_path / "runs") not in location
    logger = tracking.RunLogger(started, "sft-seed0")
    logger.log({"train/ce": float("nan"), "optim/grad_norm": float("inf"), "speed/tokens_per_s": 5.0}, step=0)
    assert logger.problems == []
    metrics = client_of(started.uri).get_run(started.children["sft-seed0"]).data.metrics
    assert math.isnan(metrics["train/ce"]) and metrics["optim/grad_norm"] > 1e300
    assert metrics["speed/tokens_per_s"] == 5.0


def artifact(uri: str, run_id: str) -> Path:
    return Path(client_of(uri).get_run(run_id).info.artifact_uri.removeprefix("file://"))


def _trial(number: int, inbox: Any, outbox: Any) -> None:
    """A trial's life in a process of its own; trial 7 is killed before it ends."""
    settings, sweep = inbox.get()
    settings = settings.updated({"name": f"sweep/trials/{number:05d}"})
    nested = tracking.start_trial(settings, claim(settings), sweep)
    log = tracking.RunLogger(nested, "aar-seed0")
    for step in range(4):
        log.log({"train/ce": 3.0 - 0.1 * step, "held_out/ce": float(number)}, step)
    if number == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    problems = [*nested.problems, *log.problems, *tracking.finish(nested, FINISHED, {"aar-seed0": "FINISHED"})]
    outbox.put((number, problems))


def test_eight_trials_at_once_on_an_empty_store(tmp_path: Path) -> None:
    """Forked before this process opens the store, which none of them finds made."""
    context = multiprocessing.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    trials = [context.Process(target=_trial, args=(number, inbox, outbox)) for number in range(8)]
    for trial in trials:
        trial.start()
    settings = config(tmp_path).updated({"name": "sweep"})
    sweep = tracking.start(settings, claim(settings), with_children=False)
    assert sweep.parent is not None and not sweep.problems
    for _ in trials:
        inbox.put((settings, sweep))
    for trial in trials:
        trial.join(timeout=240)
    assert [trial.exitcode for trial in trials] == [0] * 7 + [-signal.SIGKILL]
    assert sorted(outbox.get(timeout=10) for _ in range(7)) == [(number, []) for number in range(7)]

    client = client_of(sweep.uri)
    nested = client.search_runs([sweep.experiment_id], f"tags.mlflow.parentRunId = '{sweep.parent}'")
    trained = [run for run in nested if run.info.run_name.endswith("aar-seed0")]
    assert sorted(run.data.metrics["held_out/ce"] for run in trained) == [float(number) for number in range(8)]
    assert all(len(client.get_metric_history(run.info.run_id, "train/ce")) == 4 for run in trained)
    assert {run.info.artifact_uri.startswith((tmp_path / "mlflow_artifacts").as_uri()) for run in nested} == {True}
    killed = [run.info.run_id for run in trained if run.info.status == "RUNNING"]
    assert len(killed) == 1 and client.get_run(killed[0]).data.metrics["held_out/ce"] == 7.0
    tracking.start(settings, tmp_path / "sweep")
    assert client.get_run(killed[0]).info.status == "FAILED"


@pytest.mark.slow
def test_a_remote_server(tmp_path: Path) -> None:
    """Its store and artefacts are the server's; the client knows the URI only."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        Path(sys.executable).with_name("mlflow"), "server", "--host=127.0.0.1", f"--port={port}", "--workers=1",
        f"--backend-store-uri=sqlite:///{tmp_path / 'server.db'}", f"--artifacts-destination={tmp_path / 'artefacts'}",
    ]  # fmt: skip
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait_for_port(port, server)
        settings = config(tmp_path / "runs", **{"tracking.uri": f"http://127.0.0.1:{port}"})
        started = tracking.start(settings, claim(settings))
        assert started.parent is not None and not started.problems
        log = tracking.RunLogger(started, "aar-seed0")
        log.log({"train/ce": 1.5}, 0)
        assert not log.problems
        assert tracking.finish(started, FINISHED, {"aar-seed0": FINISHED}) == []
        client = client_of(started.uri)
        assert client.get_run(started.children["aar-seed0"]).data.metrics == {"train/ce": 1.5}
        assert client.get_run(started.parent).info.status == "FINISHED"
        assert [path.name for path in (tmp_path / "artefacts").rglob("config.json")] == ["config.json"]
        assert not (tmp_path / "runs" / "mlflow.db").exists()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert server.poll() is None, "the server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the server did not come up")


def test_refusals_are_reported_and_do_not_raise(tmp_path: Path) -> None:
    settings = config(tmp_path, **{"tracking.uri": "nosuchstore://x"})
    started = tracking.start(settings, claim(settings))
    assert started.parent is None
    assert "nosuchstore" in started.problems[0]
    assert tracking.finish(started, FINISHED, {}) == []
    broken = tracking.RunLogger(started._replace(children={"aar-seed0": "x"}), "aar-seed0")
    for step in range(5):
        broken.log({"train/ce": 1.0}, step)
    assert len(broken.problems) == tracking.MAX_PROBLEMS
