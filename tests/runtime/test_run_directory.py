"""Who owns a run directory, and how a history is cut back to a checkpoint."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aarlib.runtime.handover import hand_over
from aarlib.runtime.run_directory import append_line, check_claim, claim, cut_history, held, pending_runs, run_directory
from aarlib.runtime.writer import writer
from aarlib.training.config import RunConfig

ROOT = Path(__file__).parents[2]


def config(storage: Path, **changes: object) -> RunConfig:
    base = RunConfig.from_mapping(
        {
            "name": "run",
            "data": {"train": ["nano:sft:10"]},
            "method": {"sft": {"name": "router_sft"}},
            "seeds": [0, 1],
            "optim": {"global_batch": 4, "micro_batch": 1},
            "ray": {"storage": str(storage)},
        }
    )
    return base.updated(changes)


def test_the_same_config_takes_the_directory_up_again(tmp_path: Path) -> None:
    folder = claim(config(tmp_path))
    assert claim(config(tmp_path, **{"ray.num_workers": 1})) == folder
    (folder / "sft-seed0").mkdir()
    (folder / "sft-seed0" / "result.json").write_text("{}")
    assert [run.name for run in pending_runs(folder, config(tmp_path))] == ["sft-seed1"]


def test_another_config_is_refused_and_named(tmp_path: Path) -> None:
    claim(config(tmp_path))
    with pytest.raises(ValueError, match=r"exists with another config \(optim.learning_rate: 0.0001 there, 0.1 here\)"):
        check_claim(config(tmp_path, **{"optim.learning_rate": 0.1}))


def test_a_folder_that_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    run_directory(config(tmp_path)).mkdir()
    check_claim(config(tmp_path))
    (run_directory(config(tmp_path)) / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="is no run directory; choose another name"):
        claim(config(tmp_path))


def test_a_directory_in_use_is_refused_until_its_process_is_gone(tmp_path: Path) -> None:
    code = """
import os, sys
from aarlib.runtime.run_directory import held
from aarlib.training.config import RunConfig
with held(RunConfig.model_validate_json(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
    settings = config(tmp_path)
    command = [sys.executable, "-c", code, settings.to_json()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"is in use by process {other.pid} on ") as refusal, held(settings):
            pass
        assert "wait for it, or choose another name" in str(refusal.value)
        other.kill()
    with held(settings) as folder:
        assert claim(settings) == folder


def test_a_config_written_before_a_field_was_added_is_the_same_config(tmp_path: Path) -> None:
    stored = claim(config(tmp_path)) / "config.json"
    values = json.loads(stored.read_text())
    del values["data"]["packing"]
    stored.write_text(json.dumps(values))
    check_claim(config(tmp_path))
    with pytest.raises(ValueError, match="data.packing: False there, True here"):
        check_claim(config(tmp_path, **{"data.packing": True}))


def test_history_is_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rows.jsonl"
    for step in range(5):
        append_line(path, {"step": step})
    with path.open("a") as file:
        file.write('{"step": 5')
    cut_history(path, 3)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]
    cut_history(tmp_path / "absent.jsonl", 3)


HOLD = """
import sys, time
from pathlib import Path
from aarlib.runtime.storage import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_worker_group_waits_for_one_that_outlives_its_driver(tmp_path: Path) -> None:
    token, entered = hand_over(str(tmp_path), "one"), threading.Event()

    def begin() -> None:
        with writer(str(tmp_path), "one", token):
            entered.set()

    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "one"], stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None and orphan.stdout.readline() == b"held\n"
        group = threading.Thread(target=begin)
        group.start()
        assert not entered.wait(0.5)
        orphan.kill()
        assert entered.wait(60)
        group.join()
