"""Units of rows, splits by document, and FDAA through the trainer: workers, a population and the cache change nothing."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.runtime.conversations import save_model
from tests.runtime.processes import kill_a_worker

pytestmark = pytest.mark.ray
pytest.importorskip("ray")
pytest.importorskip("deepspeed")

from aarlib.runtime.batches import encoded_rows  # noqa: E402
from aarlib.runtime.text_corpus import build_text_corpus, find_texts, ordered_units, unit_order  # noqa: E402
from aarlib.runtime.trainer import check, record_data, train  # noqa: E402
from aarlib.training.config import RunConfig  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    save_model(folder / "model")
    for name, count in (("long", 40), ("short", 12)):
        rows = [
            {"text": f"Document {i} of the {name} file tells of {i * i} boats in a row. " * 4} for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(folder: Path, name: str, **changes: Any) -> RunConfig:
    values = {
        "name": name,
        "model": {"name": str(folder / "model"), "dtype": "float32", "experts_implementation": "eager"},
        "data": {
            "domains": {key: {"text": [str(folder / f"{key}.jsonl")]} for key in ("long", "short")},
            "held_out": 0.2, "test": 0.2, "sequence_length": 32, "unit_rows": 4, "order_seed": 0,
        },
        "method": {"fdaa": {"name": "fdaa", "layers": [1, 2]}},
        "optim": {"learning_rate": 1e-3, "global_batch": 8, "micro_batch": 2, "max_steps": 12, "epochs": 9, "log_every": 3},
        "ray": {"storage": str(folder / "runs"), "num_workers": 2, "checkpoint_every": 3},
    }  # fmt: skip
    return RunConfig.from_mapping(values).updated(changes)


def test_units_alternate_domains_and_small_domains_start_again() -> None:
    ids = [[f"a{i}" for i in range(10)], [f"b{i}" for i in range(3)]]
    places = unit_order(ids, 4, "0/0")
    order = {place: row for row, found in places.items() for place in found}
    assert sorted(order) == list(range(24))
    for place, row in order.items():
        assert row.startswith("ab"[place // 4 % 2])
    counts = Counter(row for row in order.values())
    assert all(counts[row] >= 1 for row in ids[0]) and {counts[row] for row in ids[1]} == {4}
    stream = [order[place] for place in sorted(order) if place // 4 % 2 == 1]
    passes = {tuple(stream[start : start + 3]) for start in range(0, 12, 3)}
    assert len(passes) > 1 and all(set(rows) == set(ids[1]) for rows in passes)
    assert unit_order(ids, 4, "0/1") != places and unit_order(ids, 4, "0/0") == places


def test_epochs_are_whole_units_and_share_no_document_with_the_other_splits(local_ray: Any, folder: Path) -> None:
    settings = config(folder, "corpus")
    corpus = build_text_corpus(settings.model, settings.data)
    rows = [encoded_rows(t) for t in ordered_units(corpus, settings.data, 0, 1).iter_batches(batch_format="pyarrow")]
    train_rows = [row for part in rows for row in part]
    assert len(train_rows) == corpus.num_train
    first = corpus.num_train // 4
    assert [row.unit for row in train_rows] == [first + index // 4 for index in range(len(train_rows))]
    assert all((row.unit % 2 == 0) == row.row_id.startswith("long") for row in train_rows)
    held_out = [row for t in corpus.held_out.iter_batches(batch_format="pyarrow") for row in encoded_rows(t)]
    documents = [{row.row_id.split("+")[0] for row in part} for part in (train_rows, held_out)]
    assert not documents[0] & documents[1]


def test_text_that_changed_by_one_word_is_refused(local_ray: Any, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text((folder / "long.jsonl").read_text())
    settings = config(folder, "words", **{"data.domains": {"own": {"text": [str(path)]}}})
    begun = build_text_corpus(settings.model, settings.data)
    assert len(begun.digest) == 16
    record_data(tmp_path, begun)
    again = build_text_corpus(settings.model, settings.data)
    record_data(tmp_path, again)
    row = next(
        row.row_id for table in begun.held_out.iter_batches(batch_format="pyarrow") for row in encoded_rows(table)
    )
    lines = path.read_text().splitlines()
    number = int(row.partition("+")[0].rpartition(":")[2]) - 1
    lines[number] = lines[number].replace("boats", "goats", 1)
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=f"the rows are not those this run was begun on \\({begun.digest} in"):
        record_data(tmp_path, build_text_corpus(settings.model, settings.data))


def test_bad_texts_are_refused_before_anything_starts(folder: Path) -> None:
    with pytest.raises(ValueError, match="data: give either train"):
        config(folder, "bad", **{"data.domains": {}})
    with pytest.raises(ValueError, match=r"data.domains.long: '/none/\*.txt' names no"):
        find_texts(config(folder, "bad", **{"data.domains.long.text": ["/none/*.txt"]}).data)
    with pytest.raises(ValueError, match=r"'nano:latin:3' is not of the form nano:<register>:<number of articles>"):
        find_texts(config(folder, "bad", **{"data.domains.long.text": ["nano:latin:3"]}).data)
    with pytest.raises(ValueError, match="method.fdaa: layers: layer 9 has no router"):
        check(config(folder, "bad", **{"method.fdaa.layers": [9]}))
    with pytest.raises(ValueError, match="set data.order_seed"):
        config(folder, "bad", **{"optim.population": True, "seeds": [0, 1], "data.order_seed": None})


def test_a_corpus_too_small_for_its_split_is_refused(local_ray: Any, folder: Path) -> None:
    settings = config(folder, "small", **{"data.sequence_length": 4000})
    with pytest.raises(ValueError, match="its training documents fill no window of data.sequence_length = 4000"):
        build_text_corpus(settings.model, settings.data)


def adapters(folder: Path, name: str) -> dict[str, Any]:
    found = (folder / "runs" / name).glob("*-seed*/adapter/adapter.safetensors")
    return {path.parent.parent.name: load_file(path) for path in found}


def lines(folder: Path, name: str, run: str, file: str) -> list[Any]:
    return [json.loads(line) for line in (folder / "runs" / name / run / file).read_text().splitlines()]


@pytest.mark.long
@pytest.mark.slow
def test_workers_a_population_the_cache_and_a_killed_worker_change_nothing(local_ray: Any, folder: Path) -> None:
    """Every head of the population against its training alone; the population again, its worker killed after a checkpoint."""
    two = {"two": {"name": "fdaa", "layers": [1, 2], "kl_weight": 0.5}, "fdaa": {"name": "fdaa", "layers": [1, 2]}}
    methods = two | {"static": {"name": "static_calibrator", "layers": [1, 2]}}
    one_worker = {"ray.num_workers": 1, "seeds": [0, 1]}
    train(config(folder, "two_workers", **{"ray.num_workers": 2}))
    train(config(folder, "apart", **one_worker, method=methods))
    together = {"optim.population": True, "optim.prefix_cache_gib": 0.01, **one_worker}
    train(config(folder, "together", **together, method=methods))
    killer = threading.Thread(target=kill_a_worker, args=(folder / "runs/killed/fdaa-seed0/rows.jsonl", 5))
    killer.start()
    train(config(folder, "killed", **together, method=methods))
    killer.join()
    names = ("two_workers", "apart", "together", "killed")
    two_workers, apart, all_of, killed = (adapters(folder, name) for name in names)
    assert set(all_of) == {"two-seed0", "two-seed1", "fdaa-seed0", "fdaa-seed1", "static-seed0"}
    assert not list((folder / "runs" / "together" / "prefix_cache").glob("*"))
    moved = max(float(tensor.abs().max()) for key, tensor in apart["fdaa-seed0"].items() if "score" in key)
    assert moved > 1e-3
    assert largest(two_workers["fdaa-seed0"], apart["fdaa-seed0"]) < 1e-5
    assert len((folder / "runs" / "killed" / "starts.jsonl").read_text().splitlines()) == 2
    for name in all_of:
        assert largest(all_of[name], apart[name]) < 1e-6, name
        assert largest(killed[name], all_of[name]) < 1e-6, name
        assert lines(folder, "killed", name, "rows.jsonl") == lines(folder, "apart", name, "rows.jsonl")
    difference = all_of["two-seed0"]["head.mix.weight"] - all_of["fdaa-seed0"]["head.mix.weight"]
    assert float(difference.abs().max()) > 1e-5
    metrics = lines(folder, "together", "fdaa-seed0", "metrics.jsonl")[-1]
    assert {"train/ce", "train/kl_penalty", "train/score_penalty"} <= metrics.keys()
    rows = lines(folder, "together", "fdaa-seed0", "rows.jsonl")
    assert rows == lines(folder, "two_workers", "fdaa-seed0", "rows.jsonl")
    result = json.loads((folder / "runs" / "together" / "static-seed0" / "result.json").read_text())
    assert result["frozen_sha256_before"] == result["frozen_sha256_after"] and result["steps"] == 12


def largest(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - theirs[key]).abs().max()) for key in ours)
