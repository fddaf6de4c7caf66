"""Every adapter and task once, in actors; a second run reads what the first wrote."""

import pytest
import torch

from aarlib.runtime.evaluation import Evaluator, evaluate, harness_settings, tasks_here
from aarlib.runtime.harness_tasks import resolve_tasks, task_manager
from aarlib.training.adapter import fingerprint, save_adapter
from aarlib.training.config import EvaluateConfig, RunConfig
from tests.runtime.canned import attach_random, character_tokenizer, tiny_pair, write_choice, write_generation


@pytest.mark.ray
def test_every_adapter_and_task_is_scored_once(local_ray, tmp_path):
    base, run_dir = tmp_path / "base", tmp_path / "runs" / "tiny"
    model, _ = tiny_pair(randomised=False)
    model.save_pretrained(base)
    character_tokenizer().save_pretrained(base)
    write_choice(tmp_path / "tasks")
    write_generation(tmp_path / "tasks", ["short", "a longer question"])
    config = RunConfig.from_mapping(
        {
            "name": "tiny",
            "seeds": [0, 1],
            "model": {"name": str(base)},
            "ray": {"storage": str(tmp_path / "runs")},
            "data": {"train": ["unused"]},
            "method": {"aar": {"name": "aar", "layers": [1, 2], "window": 6}},
            "evaluate": {
                "tasks": ["canned_choice", "canned_generation"],
                "include_path": str(tmp_path / "tasks"),
                "num_actors": 2,
            },
        }
    )
    for seed in config.seeds:
        handle = attach_random(model, seed)
        save_adapter(handle, run_dir / f"aar-seed{seed}" / "adapter")
        handle.detach()
    evaluation = evaluate(config)
    assert set(evaluation.scores["adapter"]) == {"untouched", "aar-seed0", "aar-seed1"}
    assert len(evaluation.scores) == 3 * 2 and len(evaluation.samples) == 3 * (6 + 2)
    choices = evaluation.samples[evaluation.samples["task"] == "canned_choice"]
    assert choices.groupby("adapter")["responses"].first().nunique() == 3

    parts = {path: path.stat().st_mtime_ns for path in (run_dir / "evaluation" / "parts").iterdir()}
    again = evaluate(config)
    assert {path: path.stat().st_mtime_ns for path in (run_dir / "evaluation" / "parts").iterdir()} == parts
    assert again.scores.equals(evaluation.scores)
    with pytest.raises(ValueError, match="setting harness"):
        evaluate(config.updated({"evaluate.batch_size": 2}))

    (tmp_path / "tasks" / "more.txt").write_text("another definition")
    with pytest.raises(ValueError, match="6 changed units"):
        evaluate(config)
    (tmp_path / "tasks" / "more.txt").unlink()

    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1.0)
    model.save_pretrained(base)
    assert evaluate(config).scores.equals(evaluation.scores), "the base is the one that the adapters name"


def test_a_base_that_is_no_longer_the_adapters_is_refused(tmp_path):
    base, tasks = tmp_path / "base", tmp_path / "tasks"
    model, _ = tiny_pair(randomised=False)
    character_tokenizer().save_pretrained(base)
    write_choice(tasks)
    config = EvaluateConfig(tasks=("canned_choice",), include_path=tasks)
    arguments = {
        "model": {"name": str(base)}, "tasks": config.tasks, "harness": harness_settings(config)._asdict(), "gpus": 0,
        "base_fingerprint": fingerprint(model), "storage": str(tmp_path), "name": "tiny", "folders": [str(tasks)],
        "evaluate": config.model_dump(mode="json"),
    }  # fmt: skip
    model.save_pretrained(base)
    Evaluator(**arguments)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1.0)
    model.save_pretrained(base)
    with pytest.raises(ValueError, match="no longer the base that the adapters were trained on"):
        Evaluator(**arguments)


def test_a_node_without_the_drivers_tasks_finds_its_own(tmp_path):
    write_choice(tmp_path / "tasks")
    source = resolve_tasks(["canned_choice"], [tmp_path / "tasks"])
    config = EvaluateConfig(tasks=("canned_choice", "nano_ioi"), include_path=tmp_path / "tasks", limit=3)
    assert tasks_here(source, config, tmp_path / "here") == source and not (tmp_path / "here").exists()
    found = tasks_here(source._replace(folders=("/nowhere",)), config, tmp_path / "here")
    assert found.names == config.tasks and str(tmp_path / "here" / "tasks") in found.folders
    assert {*config.tasks} <= {*task_manager(found).task_index}
