"""Ray Data: the same rows in the same order for any division into files; what is refused, and how."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.conversations import write_conversations

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from aarlib.runtime.batches import encoded_rows  # noqa: E402
from aarlib.runtime.corpus import build_corpus, find_sources, ordered  # noqa: E402
from aarlib.training.config import DataConfig, ModelConfig  # noqa: E402

NANO = ModelConfig()


def ids(dataset: Any) -> list[str]:
    return [row["row_id"] for row in dataset.select_columns(["row_id"]).take_all()]


def data(*paths: Path, **changes: Any) -> DataConfig:
    return DataConfig(train=tuple(map(str, paths)), **{"held_out": 0.25, "sequence_length": 48, **changes})


def test_rows_order_and_split(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 60)
    corpus = build_corpus(NANO, data(path))
    first, second, epoch1 = ordered(corpus, 0, 0), ordered(corpus, 1, 0), ordered(corpus, 0, 1)
    orders = [ids(dataset) for dataset in (first, second, epoch1)]
    held_out = ids(corpus.held_out)
    assert len(orders[0]) == corpus.num_train and sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) == 3
    assert not set(held_out) & set(orders[0]) and len(held_out) == corpus.num_held_out >= 2
    assert corpus.num_truncated == 20

    streamed = [
        row for table in first.iter_batches(batch_size=7, batch_format="pyarrow") for row in encoded_rows(table)
    ]
    assert [row.row_id for row in streamed] == orders[0]
    assert sum(row.num_targets for row in streamed) == corpus.num_train_targets
    assert any(row.num_targets == 0 for row in streamed) and max(len(row.input_ids) for row in streamed) == 48

    again = build_corpus(NANO, data(path, tmp_path / "*.jsonl", max_held_out=2, sample=0.5))
    assert set(ids(ordered(again, 0, 0))) < set(orders[0])
    assert len(ids(again.encoded)) == len(set(ids(again.encoded)))
    assert ids(again.held_out) == [row for row in held_out if row in set(ids(again.encoded))][:2]


def test_bad_rows(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 20)
    lines = path.read_text().splitlines()
    lines[6] = json.dumps({"text": "no conversation"})
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"^/[^ ]*rows.jsonl:7: no conversation: `messages` must be"):
        build_corpus(NANO, data(path))
    corpus = build_corpus(NANO, data(path, on_bad_row="skip"))
    assert corpus.encoded.count() == 19


def test_nothing_left(local_ray: Any, tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "rows.jsonl", 8)
    with pytest.raises(ValueError, match="no conversation left with data.sample = 1e-09"):
        build_corpus(NANO, data(path, sample=1e-9))
    with pytest.raises(ValueError, match=r"data.held_out = 1e-09 leaves 0 conversations to evaluate on"):
        build_corpus(NANO, data(path, held_out=1e-9))
    with pytest.raises(ValueError, match=r"no training row has a target token within data.sequence_length = 4"):
        build_corpus(NANO, data(path, sequence_length=4))


def test_sources() -> None:
    with pytest.raises(ValueError, match="names no .parquet"):
        find_sources(("nowhere/*.jsonl",))
    with pytest.raises(ValueError, match="not of the form nano:<split>:<number of rows>"):
        find_sources(("nano:sft",))
    assert find_sources(("nano:sft:5",)) == ["nano:sft:5"]
