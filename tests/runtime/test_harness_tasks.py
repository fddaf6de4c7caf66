"""Tasks that cannot or must not run are refused before a model is loaded."""

import json
from pathlib import Path

import lm_eval
import pytest

from aarlib.runtime.harness_tasks import resolve_tasks
from tests.runtime.canned import write_choice

LM_EVAL_TASKS = Path(lm_eval.__file__).parent / "tasks"


@pytest.mark.parametrize("task", ["humaneval", "humaneval_instruct", "humaneval_plus", "mbpp", "mbpp_plus"])
def test_tasks_that_run_generated_code_are_refused_without_importing_them(task):
    folders = [LM_EVAL_TASKS / "humaneval", LM_EVAL_TASKS / "mbpp"]
    with pytest.raises(ValueError, match=rf"{task}.* runs code that the model wrote"):
        resolve_tasks([task], folders)


def test_a_group_with_an_unsafe_member_is_refused(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "group.yaml").write_text(json.dumps({"group": "mixed", "task": ["canned_choice", "humaneval"]}))
    with pytest.raises(ValueError, match=r"'mixed' runs code .*humaneval"):
        resolve_tasks(["mixed"], [tmp_path, LM_EVAL_TASKS / "humaneval"])


@pytest.mark.slow
def test_an_unknown_task_is_refused_with_near_names(tmp_path):
    write_choice(tmp_path)
    with pytest.raises(ValueError, match=r"no task, group or tag 'gsm8kk'; did you mean 'gsm8k"):
        resolve_tasks(["canned_choice", "gsm8kk"], [tmp_path])


def test_missing_data_is_refused_with_the_remedy(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "canned_choice.jsonl").unlink()
    with pytest.raises(ValueError, match=r"'canned_choice' cannot be loaded .*local data_files"):
        resolve_tasks(["canned_choice"], [tmp_path])


def test_a_task_whose_data_is_a_script_is_refused_with_the_remedy(tmp_path):
    write_choice(tmp_path)
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit")
    path = tmp_path / "canned_choice.yaml"
    changed = {"dataset_path": str(tmp_path / "scripted"), "dataset_kwargs": {}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(ValueError, match=r"'canned_choice' cannot be loaded .*scripts are no longer.*local data_files"):
        resolve_tasks(["canned_choice"], [tmp_path])


def test_no_tasks_is_refused():
    with pytest.raises(ValueError, match="evaluate.tasks is empty"):
        resolve_tasks([])
