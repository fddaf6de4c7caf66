"""The demo's run directory: fresh when the last demo is finished, the same when it was interrupted; and all of it, small."""

import json
import logging
import os
import re
import subprocess
import sys
import time

import pytest

from aarlib.runtime.mlflow_store import client_of, tracking_uri
from aarlib.runtime.run_directory import claim
from aarlib.training.config import RunConfig
from pipelines import demo


def config_in(folder, *overrides) -> RunConfig:
    return RunConfig.from_toml(demo.CONFIG, [f"ray.storage={folder}", *overrides])


def test_a_finished_demo_is_left_alone_and_an_interrupted_one_taken_up(tmp_path):
    config = config_in(tmp_path)
    assert demo.next_config(config).name == "nano_demo"
    folder = claim(config)
    (folder / demo.STAGES).write_text(json.dumps({"wall_s": {"train": 3.0}, "peak_gib": 1.0, "finished": False}))
    assert demo.next_config(config).name == "nano_demo"
    (folder / demo.STAGES).write_text(json.dumps({"wall_s": {"train": 3.0}, "peak_gib": 1.0, "finished": True}))
    assert demo.next_config(config).name == "nano_demo_2"


def test_an_interrupted_demo_of_another_config_is_not_mixed_with_this_one(tmp_path, capsys):
    claim(config_in(tmp_path))
    assert demo.main([f"--ray.storage={tmp_path}", "--optim.max_steps=3"]) == 2
    assert "exists with another config (optim.max_steps" in capsys.readouterr().err


class Peak:
    gib = 2.0


def test_stages_add_up_over_an_interruption(tmp_path, capsys):
    first = demo.Stages(tmp_path, Peak())
    assert first.run("train", "something", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        first.run("sweep", "something", lambda: 1 / 0)
    stored = demo.read_stages(tmp_path)
    assert set(stored["wall_s"]) == {"train"} and not stored["finished"]
    again = demo.Stages(tmp_path, Peak())
    again.run("train", "something", lambda: time.sleep(0.2))
    assert again.wall_s["train"] >= stored["wall_s"]["train"] + 0.2
    again.finish()
    assert demo.read_stages(tmp_path)["finished"]
    assert "[1/4] train: something" in capsys.readouterr().out


HELP = """
import sys
from pipelines import demo
demo.main(["--help"])
sys.exit(", ".join({"torch", "ray", "lm_eval", "mlflow", "pandas"} & set(sys.modules)) or 0)
"""


def test_help_loads_nothing_heavy_and_a_bad_field_is_named(capsys):
    result = subprocess.run([sys.executable, "-c", HELP], check=False, capture_output=True, text=True)
    assert result.returncode == 0 and "--ray.storage" in result.stdout, result.stderr
    assert demo.main(["--optim.max_stepss=3"]) == 2
    assert "did you mean 'max_steps'" in capsys.readouterr().err


def test_a_sweep_folder_of_another_config_is_refused_before_any_training(tmp_path):
    folder = tmp_path / "nano_demo-window_layers"
    folder.mkdir()
    (folder / "config.json").write_text('{"name": "another"}')
    with pytest.raises(ValueError, match="nano_demo-window_layers exists with another config"):
        demo.check(config_in(tmp_path))


SMALL = [
    "--seeds=[0]", "--optim.max_steps=2", "--optim.global_batch=8", "--data.train=['nano:sft:200']", "--data.max_held_out=12",
    "--evaluate.limit=6", "--evaluate.tasks=['nano_ioi']", "--evaluate.num_actors=1",
]  # fmt: skip


@pytest.mark.long
@pytest.mark.ray
def test_the_command_starts_a_ray_of_its_own_and_shows_what_its_workers_do(tmp_path):
    command = [sys.executable, "-m", "pipelines.demo", f"--ray.storage={tmp_path}", *SMALL]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Started a local Ray instance" in done.stderr and "attention_time" in done.stdout + done.stderr
    assert len(json.loads((tmp_path / "nano_demo" / "summary.json").read_text())["sweeps"][demo.STUDY]) == 4


@pytest.mark.slow
@pytest.mark.ray
def test_the_demo_runs_end_to_end(local_ray, tmp_path, monkeypatch, capsys, caplog):
    from ray import tune

    from aarlib.runtime.tune_study import Study
    from tune_spaces import aar_window_layers

    fixed = {"ray.num_workers": 1, "optim.max_steps": 1}
    small = Study(space={"method.aar.window": tune.grid_search([16])}, fixed=fixed)
    monkeypatch.setattr(aar_window_layers, "STUDY", small)
    caplog.set_level(logging.INFO, "aarlib")
    monkeypatch.chdir(tmp_path)
    assert demo.main(SMALL) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "runs" / "nano_demo"
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["label"] for row in summary["held_out"]] == ["untouched", "router_sft", "aar_t", "aar"]
    assert len(summary["scores"]) == 4 and all(row["num_documents"] == 6 for row in summary["scores"])
    assert not summary["unfinished"]
    assert set(summary["stages"]["wall_s"]) == {"check", "train", "sweep", "evaluate"}
    assert summary["stages"]["peak_gib"] > 0.5
    assert str(folder / "report.html") in out
    assert re.search(r"mlflow ui --backend-store-uri sqlite:///\S+ --host 127.0.0.1", out)
    assert demo.next_config(config_in(tmp_path / "runs")).name == "nano_demo_2"
    assert len(summary["sweeps"][demo.STUDY]) == 1
    histories = {
        (folder / name / "rows.jsonl").read_text() for name in ("router_sft-seed0", "aar_t-seed0", "aar-seed0")
    }
    assert len(histories) == 1, "every method sees the same rows in the same order"
    assert len((folder / "starts.jsonl").read_text().splitlines()) == 1, "one worker group trains them all"
    assert "trainable parameters (aar)" in caplog.text
    check_sweep(tmp_path / "runs")


def check_sweep(storage):
    folder = storage / f"nano_demo-{demo.STUDY}"
    trials = json.loads((folder / "results.json").read_text())
    assert [row["status"] for row in trials] == ["finished"]
    config = json.loads((folder / "trials" / "00000" / "config.json").read_text())
    assert config["method"]["aar"]["window"] == trials[0]["method.aar.window"] == 16
    assert sorted(path.name for path in (folder / "trials").iterdir()) == ["00000"]
    client = client_of(tracking_uri(config_in(storage)))
    experiment = client.get_experiment_by_name("nano_demo")
    runs = client.search_runs([experiment.experiment_id])
    parents = {run.info.run_id: run.info.run_name for run in runs if "mlflow.parentRunId" not in run.data.tags}
    assert sorted(parents.values()) == ["nano_demo", folder.name]
    nested = [run for run in runs if parents.get(run.data.tags.get("mlflow.parentRunId", "")) == folder.name]
    assert [run.info.status for run in nested] == ["FINISHED"]
