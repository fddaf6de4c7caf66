import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aarlib.data.corpora import TextDocument, read_documents, separator_id, split_of, windows
from aarlib.moe.loading import load_tokenizer

WIKI = " \n = First = \n \n Some text . \n = = Section = = \n More . \n = Second one = \n Other text . \n"


def test_wikitext_articles_are_documents(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_bytes(WIKI.replace("\n", "\r\n").encode())
    found = list(read_documents(str(path), "headings"))
    assert [document.doc_id for document in found] == ["wiki.txt:2", "wiki.txt:7"]
    assert found[0].text == " = First = \n \n Some text . \n = = Section = = \n More . \n"
    assert [document.text for document in read_documents(str(path))] == [WIKI]
    rows = [{"text": line} for line in WIKI.splitlines(keepends=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "wiki.parquet")
    assert [d.text for d in read_documents(str(tmp_path / "wiki.parquet"), "headings")] == [d.text for d in found]


def test_rows_of_jsonl_are_documents_and_bad_rows_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps({"text": text}) for text in ("one", " ", "two")).encode()))
    assert list(read_documents(str(path))) == [TextDocument("a.jsonl.gz:1", "one"), TextDocument("a.jsonl.gz:3", "two")]
    rows = [{"sentence": "one"}, {"sentence": "two"}]
    (tmp_path / "ptb.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "ptb.parquet")
    for name in ("ptb.jsonl", "ptb.parquet"):
        found = list(read_documents(tmp_path / name, column="sentence"))
        assert found == [TextDocument(f"{name}:1", "one"), TextDocument(f"{name}:2", "two")]
        with pytest.raises(ValueError, match=r"no (string under|column) `text`"):
            list(read_documents(tmp_path / name))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"content": "x"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: no string under `text`"):
        list(read_documents(str(bad)))
    (tmp_path / "x.csv").write_text("x")
    with pytest.raises(ValueError, match="not a .txt, .jsonl"):
        list(read_documents(str(tmp_path / "x.csv")))


def test_splits_share_no_document_and_have_their_shares():
    splits = [split_of(f"doc:{i}", 0.1, 0.2) for i in range(5000)]
    assert abs(splits.count("test") / 5000 - 0.2) < 0.02
    assert abs(splits.count("development") / 5000 - 0.1) < 0.015
    assert [split_of(f"doc:{i}", 0.1, 0.2) for i in range(50)] == splits[:50]


def test_windows_cover_the_documents_in_order():
    tokenizer = load_tokenizer("nano")
    separator = separator_id(tokenizer)
    documents = [TextDocument(f"d:{i}", f"Document number {i} has some words in it. " * (1 + i)) for i in range(6)]
    found = list(windows(documents, tokenizer, 16, separator))
    stream = [token for d in documents for token in [*tokenizer.encode(d.text, add_special_tokens=False), separator]]
    assert [token for row in found for token in row.input_ids] == stream[: len(found) * 16]
    assert len(stream) - len(found) * 16 < 16
    assert len({row.row_id for row in found}) == len(found)
    assert all(len(row.input_ids) == 16 and row.num_targets == 15 for row in found)
    for row in found:
        name, _, offset = row.row_id.partition("+")
        document = next(d for d in documents if d.doc_id == name)
        tokens = [*tokenizer.encode(document.text, add_special_tokens=False), separator]
        assert tokens[int(offset) :][:16] == row.input_ids[: len(tokens) - int(offset)][:16]


def test_real_wikitext_splits_by_article(shared_data):
    found = list(read_documents(str(shared_data / "lm" / "wikitext2_raw_test.txt"), "headings"))
    assert 55 <= len(found) <= 65
    assert all(document.text.startswith(" = ") for document in found)
