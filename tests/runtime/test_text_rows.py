"""The rows that training gets of plain text: made of documents of the training split, of all of them and of no other."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

pytest.importorskip("ray")

from aarlib.data.corpora import TextDocument, separator_id, split_of  # noqa: E402
from aarlib.moe.loading import load_tokenizer  # noqa: E402
from aarlib.runtime.text_corpus import Source, documents_of, find_texts, read_windows  # noqa: E402
from aarlib.training.config import DataConfig  # noqa: E402

HELD_OUT, TEST = 0.2, 0.25
LENGTH = 32


def data_of(path: Path, documents: str) -> DataConfig:
    domain = {"text": [str(path)], "documents": documents}
    return DataConfig.from_mapping(
        {"domains": {"own": domain}, "held_out": HELD_OUT, "test": TEST, "sequence_length": LENGTH}
    )


def tokens_of(documents: list[TextDocument]) -> list[int]:
    tokenizer = load_tokenizer("nano")
    separator = separator_id(tokenizer)
    return [
        token for _, text in documents for token in (*tokenizer(text, add_special_tokens=False).input_ids, separator)
    ]


def check(path: Path, documents: str) -> dict[str, list[TextDocument]]:
    """Windows of each split, one after another, are the tokens of that split's documents; the documents by split."""
    data = data_of(path, documents)
    sources = pa.Table.from_pylist([source._asdict() for source in find_texts(data)])
    table = read_windows(sources, {"name": "nano"}, data.model_dump(mode="json"))
    by_split: dict[str, list[TextDocument]] = {"train": [], "development": [], "test": []}
    for document in documents_of(Source(0, str(path), documents)):
        by_split[split_of(document.doc_id, HELD_OUT, TEST)].append(document)
    assert all(by_split.values())
    found: dict[Any, list[int]] = {True: [], False: []}
    for ids, held_out in zip(table["input_ids"].to_pylist(), table["held_out"].to_pylist(), strict=True):
        assert len(ids) == LENGTH
        found[held_out] += ids
    for split, held_out in (("train", False), ("development", True)):
        expected = tokens_of(by_split[split])
        assert found[held_out] == expected[: len(expected) // LENGTH * LENGTH], split
    starts = {
        row.rpartition("+")[0] for row in table.filter(pa.array(~table["held_out"].to_numpy()))["row_id"].to_pylist()
    }
    assert starts <= {document.doc_id for document in by_split["train"]}
    return by_split


def test_training_windows_hold_the_training_documents_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"The number of this one is {i}. " * 6}) for i in range(40)))
    check(path, "whole")


def test_training_windows_of_real_wikitext_hold_whole_articles_of_the_training_split(shared_data: Path) -> None:
    by_split = check(shared_data / "lm" / "wikitext2_raw_test.txt", "headings")
    assert all(document.text.lstrip().startswith("= ") for documents in by_split.values() for document in documents)
