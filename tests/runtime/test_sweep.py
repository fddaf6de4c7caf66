"""Sweeps: bad and crashed trials do not end one, finished ones are kept; the scheduler stops the worse on what workers report."""

import json
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from tests.runtime.conversations import run_config, save_model, write_conversations
from tests.runtime.processes import kill_a_worker, start_driver

pytest.importorskip("ray")

from ray import tune  # noqa: E402
from ray.tune.experiment import Trial  # noqa: E402
from ray.tune.search.optuna import OptunaSearch  # noqa: E402

from aarlib.report.figures import DARK  # noqa: E402
from aarlib.report.records import Sweep  # noqa: E402
from aarlib.report.sweep_figures import sweep_overview  # noqa: E402
from aarlib.runtime.mlflow_store import client_of  # noqa: E402
from aarlib.runtime.run_directory import run_directory  # noqa: E402
from aarlib.runtime.storage import SCRATCH  # noqa: E402
from aarlib.runtime.sweep import HEAD, _plain, check_place, check_sweep, ranked, sweep, this_node, trial_name  # noqa: E402
from aarlib.runtime.tune_study import Study, asha  # noqa: E402
from aarlib.training.config import RunConfig  # noqa: E402


class Bench(NamedTuple):
    model: Path
    data: Path
    storage: Path

    def config(self, name: str) -> RunConfig:
        return run_config(self.model, self.data, self.storage, name)


@pytest.fixture(scope="module")
def bench(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("sweep")
    return Bench(save_model(folder / "model"), write_conversations(folder / "rows.jsonl", 64), folder / "runs")


def children(result: Any) -> dict[str, list[str]]:
    """Status of each run under the sweep's parent, by the trial's number."""
    client = client_of(result.tracking.uri)
    parent = f"tags.mlflow.parentRunId = '{result.tracking.parent}'"
    runs = client.search_runs([result.tracking.experiment_id], parent)
    return {run.info.run_name: run.info.status for run in runs}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_bad_and_crashed_trials_and_a_restored_sweep(bench: Bench) -> None:
    study = Study(
        space={"method.aar.window": tune.grid_search([2, 8, 400])},
        fixed={"ray.num_workers": 1, "optim.max_steps": 3},
    )
    base = bench.config("swept")
    trials = bench.storage / "swept-window" / "trials"
    (trials / "00001").mkdir(parents=True)
    (trials / "00001" / "thesis.tex").write_text("precious")
    (bench.storage / "swept-window" / "config.json").write_text(
        check_sweep(bench.config("other"), study, "window").updated({"name": "swept-window"}).to_json()
    )
    first = sweep(base, study, "window")
    assert json.loads((first.folder / "data.json").read_text())["digest"]
    table = first.sweep.trials.set_index("trial")
    assert table["status"].to_dict() == {"00000": "finished", "00001": "failed", "00002": "failed"}
    assert "is no run directory" in table.loc["00001", "problem"]
    assert "method.aar.window = 400 is longer than data.sequence_length = 48" in table.loc["00002", "problem"]
    assert not (trials / "00002").exists()
    assert children(first) == {"00000/aar-seed0": "FINISHED"}
    finished = (trials / "00000" / "aar-seed0" / "result.json").stat().st_mtime_ns

    (trials / "00001" / "thesis.tex").unlink()
    second = sweep(base, study, "window")
    table = second.sweep.trials.set_index("trial")
    assert table["status"].to_dict() == {"00000": "finished", "00001": "finished", "00002": "failed"}
    assert (trials / "00000" / "aar-seed0" / "result.json").stat().st_mtime_ns == finished
    assert table.loc["00001", "method.aar.window"] == 8 and second.best["method.aar.window"] in (2, 8)
    assert children(second) == {"00001/aar-seed0": "FINISHED"}
    assert json.loads((trials / "00001" / "config.json").read_text())["method"]["aar"]["window"] == 8
    assert (second.folder / "sweep.svg").read_text().count("<svg") == 1
    names = [path.name for path in (second.folder / "ray_tune").iterdir() if path.is_dir()]
    assert len(names) >= 3 and all(name.startswith("trial_") and "=" not in name for name in names)
    assert max(map(len, names)) < 80

    rows = bench.data.read_text()
    bench.data.write_text(rows.replace("boats", "goats", 1))
    with pytest.raises(ValueError, match="the rows are not those this run was begun on"):
        sweep(base, study, "window")
    bench.data.write_text(rows)

    edited = Study(space={"method.aar.window": tune.grid_search([2, 8])}, fixed=study.fixed)
    with pytest.raises(ValueError, match=r"holds a sweep of the study as it was before \(space differ\)"):
        sweep(base, edited, "window")


def test_trials_have_their_drivers_on_the_node_of_the_sweeps() -> None:
    nodes = [
        {"NodeID": "a", "Resources": {"CPU": 1.0, "node:10.0.0.1": 1.0, HEAD: 1.0}},
        {"NodeID": "b", "Resources": {"CPU": 1.0, "node:10.0.0.2": 1.0}},
    ]
    assert [this_node(nodes, node) for node in ("a", "b")] == [HEAD, "node:10.0.0.2"]


def test_a_trial_that_would_work_elsewhere_than_its_sweep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = {"sft": {"name": "router_sft"}}
    values = {
        "name": "swept",
        "data": {"train": ["nano:sft:8"]},
        "method": method,
        "ray": {"storage": "s3://bucket/runs"},
    }
    config = RunConfig.from_mapping(values)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "driver"))
    folder = str(run_directory(config))
    check_place(config, folder)
    monkeypatch.setenv(SCRATCH, str(tmp_path / "raylet"))
    with pytest.raises(
        ValueError, match="AARLIB_SCRATCH: the sweep works in .*/driver/.*, this trial would in .*/raylet/"
    ):
        check_place(config, folder)


WINDOWS, LAYERS = "method.aar.window", "method.aar.layers"
ONE_AT_A_TIME = {"ray.num_workers": 1, "ray.cpus_per_worker": 2, "optim.max_steps": 3}


def sweep_windows(config: RunConfig) -> Any:
    space = {WINDOWS: tune.grid_search([2, 4, 8]), LAYERS: tune.grid_search([(1, 2)])}
    return sweep(config, Study(space=space, fixed=ONE_AT_A_TIME), "windows")


def propose_windows(config: RunConfig) -> Any:
    search = partial(
        OptunaSearch, seed=0, points_to_evaluate=[{WINDOWS: window, LAYERS: (1, 2)} for window in (2, 4, 8)]
    )
    space = {WINDOWS: tune.choice([2, 4, 8]), LAYERS: tune.choice([(1, 2)])}
    study = Study(space=space, fixed=ONE_AT_A_TIME, num_samples=3, search=search)
    return sweep(config, study, "windows")


def test_the_best_trial_is_the_first_row_and_only_a_finished_one_is() -> None:
    drawn = [("stopped", 0.5), ("finished", 2.0), ("failed", None), ("finished", 1.0), ("stopped", 0.1)]
    rows = ranked([{"status": status, "held_out_ce": ce} for status, ce in drawn])
    found = [(row["status"], row["held_out_ce"]) for row in rows]
    assert found == [("finished", 1.0), ("finished", 2.0), ("failed", None), ("stopped", 0.1), ("stopped", 0.5)]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("run", [sweep_windows, propose_windows])
def test_a_sweep_whose_driver_was_killed_keeps_its_finished_trials(
    bench: Bench, tmp_path: Path, run: Callable[[RunConfig], Any]
) -> None:
    """On a grid; and proposed by Optuna, which goes on where it was: it has three points and then its own."""
    config = bench.config(f"orphaned_{run.__name__}")
    trials = bench.storage / f"{config.name}-windows" / "trials"
    driver = start_driver(config, tmp_path, f"from tests.runtime.test_sweep import {run.__name__} as run")
    while not (before := {path: path.stat().st_mtime_ns for path in trials.glob("*/*/result.json")}):
        assert driver.poll() is None, (tmp_path / "driver.log").read_text()[-2000:]
        time.sleep(0.1)
    driver.kill()
    driver.wait()
    assert len(before) < 3
    result = run(config)
    assert result.sweep.trials["status"].tolist() == ["finished"] * 3
    assert sorted(result.sweep.trials[WINDOWS]) == [2, 4, 8] and result.sweep.trials[LAYERS].tolist() == [[1, 2]] * 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    client = client_of(result.tracking.uri)
    assert not client.search_runs([result.tracking.experiment_id], "attributes.status = 'RUNNING'")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_optuna_proposes_and_asha_stops_the_worse_trial_on_what_workers_report(bench: Bench) -> None:
    """One trial at a time: the second learns nothing and is stopped at the first rung."""
    points = [{"optim.learning_rate": 1e-2}, {"optim.learning_rate": 1e-12}]
    study = Study(
        space={"optim.learning_rate": tune.uniform(1e-12, 1e-2)},
        fixed={"ray.num_workers": 1, "ray.cpus_per_worker": 5, "ray.checkpoint_every": 4, "optim.max_steps": 16},
        num_samples=2,
        scheduler=asha(grace_steps=4, reduction_factor=2),
        search=partial(OptunaSearch, seed=0, points_to_evaluate=points),
        time_budget_s=900,
    )
    result = sweep(bench.config("halved"), study, "rate")
    table = result.sweep.trials
    assert table["optim.learning_rate"].tolist() == [1e-2, 1e-12]
    assert table["status"].tolist() == ["finished", "stopped"]
    assert table["held_out_ce"].notna().all() and table["held_out_ce"].is_monotonic_increasing
    good, bad = (result.folder / "trials" / trial / "aar-seed0" for trial in table["trial"])
    curve = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve if "held_out/ce" in line] == [3, 7, 11]
    assert len((bad / "rows.jsonl").read_text().splitlines()) < 16 and not (bad / "result.json").is_file()
    assert sorted(children(result).values()) == ["FINISHED", "KILLED"]


@pytest.mark.ray
@pytest.mark.slow
def test_a_sweep_ends_when_its_time_is_over(bench: Bench) -> None:
    """While its first trial starts."""
    study = Study(
        space={"method.aar.window": tune.grid_search([2, 4])},
        fixed={"ray.num_workers": 1, "ray.cpus_per_worker": 5, "optim.max_steps": 2},
        time_budget_s=1,
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match=r"none of \d trials finished within study.time_budget_s = 1"):
        sweep(bench.config("timed"), study, "budget")
    assert signal.getsignal(signal.SIGINT) is before, "a later Ctrl-C would end in Tune"
    rows = json.loads((bench.storage / "timed-budget" / "results.json").read_text())
    assert {row["status"] for row in rows} == {"stopped"}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_a_trial_whose_worker_is_killed_fails_and_the_other_goes_on(bench: Bench) -> None:
    study = Study(
        space={"method.aar.window": tune.grid_search([2, 4])},
        fixed={"ray.num_workers": 1, "ray.max_failures": 0, "ray.checkpoint_every": 100, "optim.max_steps": 12},
    )
    history = bench.storage / "shot-window" / "trials" / "00000" / "aar-seed0" / "rows.jsonl"
    killer = threading.Thread(target=kill_a_worker, args=(history, 2))
    killer.start()
    result = sweep(bench.config("shot"), study, "window")
    killer.join()
    assert (history.parent / "killed").is_file()
    assert result.sweep.trials["status"].tolist() == ["finished", "failed"]
    assert sorted(children(result).values()) == ["FAILED", "FINISHED"]
    again = sweep(bench.config("shot"), study, "window")
    assert again.sweep.trials["status"].tolist() == ["finished", "finished"]
    assert sorted(children(again).values()) == ["FINISHED"]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_a_study_of_the_data_prepares_rows_for_each_trial_and_a_trial_too_large_fails_at_once(bench: Bench) -> None:
    study = Study(
        space={"data.sequence_length": tune.grid_search([40]), "ray.num_workers": tune.grid_search([1, 64])},
        fixed={"optim.max_steps": 2, "optim.global_batch": 64},
    )
    result = sweep(bench.config("cut"), study, "length")
    trials = result.sweep.trials
    assert trials["status"].tolist() == ["finished", "failed"] and trials["data.sequence_length"].tolist() == [40, 40]
    assert "ray.num_workers = 64 needs 64 CPU, the cluster has 8" in trials["problem"].tolist()[1]
    assert json.loads((result.folder / "trials" / "00000" / "data.json").read_text())["digest"]
    assert not (result.folder / "trials" / "00001").exists()


def test_a_trial_of_48_layers_has_a_short_name_without_its_parameters() -> None:
    layers = tuple(range(48))
    trial = Trial(
        "run_trial",
        stub=True,
        trial_id="0a1b2_00003",
        config={"method.aar.layers": layers},
        evaluated_params={"method.aar.layers": layers},
        trial_name_creator=trial_name,
        trial_dirname_creator=trial_name,
    )
    assert str(trial) == trial.custom_dirname == "trial_0a1b2_00003"


def test_values_of_a_space_are_written_as_json_has_them() -> None:
    """A space's tuple is a list once Tune has restored it: a table shows both alike."""
    assert _plain((1, 2)) == _plain([1, 2]) == [1, 2] and _plain(0.5) == 0.5 and _plain(None) is None


def test_the_figure_shows_numbers_layers_and_stopped_trials() -> None:
    frame = pd.DataFrame(
        {
            "trial": ["0", "1", "2"],
            "status": ["finished", "finished", "stopped"],
            "held_out_ce": [1.0, 1.2, 1.5],
            "method.aar.window": [4, 8, 40],
            "method.aar.layers": [[0, 1, 2], [1], (2, 3)],
        }
    )
    figure = sweep_overview(Sweep("x", frame), DARK)
    parallel, *scatters = figure.axes
    assert [label.get_text() for label in parallel.get_xticklabels()] == ["window", "layers", "held-out CE"]
    assert sorted(line.get_linestyle() for line in parallel.lines[:3]) == ["-", "-", "--"]
    assert [label.get_text() for label in scatters[1].get_xticklabels()] == ["0-2", "1", "2 3"]
