import json
import re
from pathlib import Path

import pytest
import yaml

from aarlib.nano.config import WorldConfig
from aarlib.nano.encyclopaedia import all_facts
from aarlib.nano.tasks import TASKS, write_tasks

SMALL = WorldConfig(entities_per_subject=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), documents=20, seed=3, world=SMALL)


def _rows(folder: Path, task: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def test_every_task_has_its_yaml_its_documents_and_absolute_paths(folder: Path):
    for task in TASKS:
        settings = yaml.safe_load((folder / f"{task}.yaml").read_text())
        path = Path(settings["dataset_kwargs"]["data_files"]["test"])
        assert settings["task"] == task and path.is_absolute() and path == folder / f"{task}.jsonl"
        assert len(_rows(folder, task)) == 20
    assert yaml.safe_load((folder / "nano_group.yaml").read_text())["task"] == ["nano_facts", *TASKS[-3:]]


def test_the_marked_choice_is_the_right_one(folder: Path):
    facts = {(fact.question(), fact.value) for fact in all_facts(SMALL.seed, SMALL.entities_per_subject)}
    for row in _rows(folder, "nano_facts_biology"):
        assert len(set(row["choices"])) == 4
        assert [(row["question"], choice) in facts for choice in row["choices"]].index(True) == row["answer"]
    for row in _rows(folder, "nano_ioi"):
        assert [row["prompt"].count(choice) for choice in row["choices"]][row["answer"]] == 1
    for row in _rows(folder, "nano_math_mc"):
        assert len({re.search(r"The answer is (\d+)", choice)[1] for choice in row["choices"]}) == 4
    assert len({row["answer"] for row in _rows(folder, "nano_facts_biology")}) == 4


def test_chains_end_in_the_answer(folder: Path):
    rows = _rows(folder, "nano_gsm")
    assert {row["steps"] for row in rows} == {1, 2}
    assert all(row["chain"].endswith(f"The answer is {row['answer']}.") for row in rows)


def test_the_same_seed_writes_the_same_documents_and_another_seed_others(folder: Path, tmp_path: Path):
    again, other = (write_tasks(tmp_path / str(seed), 20, seed, SMALL) for seed in (3, 4))
    for task in TASKS:
        assert _rows(again, task) == _rows(folder, task) != _rows(other, task)


def test_lm_eval_reads_the_group(folder: Path):
    tasks = pytest.importorskip("lm_eval.tasks")
    manager = tasks.TaskManager(include_defaults=False, include_path=str(folder))
    assert {"nano", "nano_facts", *TASKS} <= set(manager.all_tasks)
    loaded = manager.load(["nano_gsm", "nano_facts_music"])["tasks"]
    assert {name: len(list(task.test_docs())) for name, task in loaded.items()} == {
        "nano_gsm": 20,
        "nano_facts_music": 20,
    }
    document = next(iter(loaded["nano_facts_music"].test_docs()))
    assert loaded["nano_facts_music"].doc_to_text(document) == f"Question: {document['question']}\nAnswer:"


def test_no_documents_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="documents = 0"):
        write_tasks(tmp_path, documents=0)
