"""Conversations and texts come from an object store as from a folder: a local S3 server, globs, formats, options in the URI."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aarlib.data.conversations import read_conversations
from aarlib.data.corpora import read_documents
from aarlib.data.sources import expand_sources
from tests.object_store import object_store

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(7)
]
TEXTS = [{"text": text} for text in (" = One = \n", " Some text . \n", " = Two = \n", " Other text . \n")]
WHOLE = "".join(row["text"] for row in TEXTS)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The options part of URIs to a server that holds bucket `rows`."""
    with object_store("rows") as (store, options):
        lines = "\n".join(json.dumps(row) for row in ROWS).encode()
        for name, content in {
            "rows/a/one.jsonl": lines,
            "rows/a/two.jsonl.gz": gzip.compress(lines),
            "rows/a/note.txt": b"no conversation",
            "rows/t/texts.jsonl": "\n".join(map(json.dumps, TEXTS)).encode(),
            "rows/t/more.jsonl.gz": gzip.compress("\n".join(map(json.dumps, TEXTS)).encode()),
            "rows/t/whole.txt": WHOLE.encode(),
        }.items():
            with store.open_output_stream(name, compression=None) as file:
                file.write(content)
        pq.write_table(pa.Table.from_pylist(ROWS), "rows/b/three.parquet", filesystem=store)
        pq.write_table(pa.Table.from_pylist(TEXTS), "rows/t/table.parquet", filesystem=store)
        yield options


def test_globs_find_the_data_files_and_nothing_else(options: str) -> None:
    found = expand_sources([f"s3://rows/a/*?{options}", f"s3://rows/b/*.parquet?{options}"])
    assert [path.split("?")[0] for path in found] == [
        "s3://rows/a/one.jsonl",
        "s3://rows/a/two.jsonl.gz",
        "s3://rows/b/three.parquet",
    ]
    assert expand_sources([f"s3://key:word@rows/a/*.jsonl?{options}"]) == [f"s3://key:word@rows/a/one.jsonl?{options}"]
    with pytest.raises(ValueError, match=r"'s3://rows/c/\*\?.*names no"):
        expand_sources([f"s3://rows/c/*?{options}"])


def test_the_rows_are_those_of_local_files(options: str, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    local = list(read_conversations(tmp_path / "one.jsonl"))
    for path in expand_sources([f"s3://rows/a?{options}", f"s3://rows/b?{options}"]):
        remote = list(read_conversations(path))
        assert [row.messages for row in remote] == [row.messages for row in local] and len(remote) == 7
        assert [row.row_id.rpartition(":")[2] for row in remote] == [row.row_id.rpartition(":")[2] for row in local]


def test_texts_of_every_format_are_read_by_audit_lens_and_training(options: str) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("lm_eval")
    from aarlib.runtime.documents import domain_documents
    from aarlib.runtime.text_corpus import documents_of, find_texts
    from aarlib.training.config import DataConfig

    pattern = f"s3://rows/t/*?{options}"
    rows = [row["text"] for row in TEXTS]
    expected = {"more.jsonl.gz": rows, "table.parquet": rows, "texts.jsonl": rows, "whole.txt": [WHOLE]}
    found = list(domain_documents(pattern, "x"))
    assert [document.doc_id for document in found] == [
        f"{name}:{number}" for name, texts in expected.items() for number, _ in enumerate(texts, 1)
    ]
    assert [document.text for document in found] == [text for texts in expected.values() for text in texts]
    data = DataConfig.from_mapping({"domains": {"one": {"text": [pattern]}}})
    assert [row for source in find_texts(data) for row in documents_of(source)] == found
    articles = [WHOLE[: WHOLE.index(" = Two")], WHOLE[WHOLE.index(" = Two") :]]
    for name in expected:
        split = [row.text for row in domain_documents(f"wikitext:s3://rows/t/{name}?{options}", "x")]
        assert split == articles
    with pytest.raises(ValueError, match=r"x: 's3://rows/none/\*\?.*names no"):
        list(domain_documents(f"s3://rows/none/*?{options}", "x"))
    with pytest.raises(ValueError, match="gone.txt.*cannot be read"):
        list(read_documents(f"s3://rows/t/gone.txt?{options}"))
