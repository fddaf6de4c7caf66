"""Conversations and texts come from object stores (local S3 and GCS servers) as from a folder: globs, formats, URI options."""

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
from tests.object_store import SCHEMES, ObjectStore, object_store

ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(7)
]
TEXTS = [{"text": text} for text in (" = One = \n", " Some text . \n", " = Two = \n", " Other text . \n")]
WHOLE = "".join(row["text"] for row in TEXTS)


@pytest.fixture(scope="module", params=SCHEMES)
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    """A server that holds bucket `rows`."""
    with object_store(request.param, "rows") as found:
        lines = "\n".join(json.dumps(row) for row in ROWS).encode()
        for name, content in {
            "rows/a/one.jsonl": lines,
            "rows/a/two.jsonl.gz": gzip.compress(lines),
            "rows/a/note.txt": b"no conversation",
            "rows/t/texts.jsonl": "\n".join(map(json.dumps, TEXTS)).encode(),
            "rows/t/more.jsonl.gz": gzip.compress("\n".join(map(json.dumps, TEXTS)).encode()),
            "rows/t/whole.txt": WHOLE.encode(),
        }.items():
            with found.filesystem.open_output_stream(name, compression=None) as file:
                file.write(content)
        pq.write_table(pa.Table.from_pylist(ROWS), "rows/b/three.parquet", filesystem=found.filesystem)
        pq.write_table(pa.Table.from_pylist(TEXTS), "rows/t/table.parquet", filesystem=found.filesystem)
        yield found


def test_globs_find_the_data_files_and_nothing_else(store: ObjectStore) -> None:
    found = expand_sources([store.uri("rows/a/*"), store.uri("rows/b/*.parquet")])
    assert found == [store.uri(f"rows/{name}") for name in ("a/one.jsonl", "a/two.jsonl.gz", "b/three.parquet")]
    with pytest.raises(ValueError, match=r"rows/c/\*\?.*names no"):
        expand_sources([store.uri("rows/c/*")])


def test_credentials_stay_in_a_uri() -> None:
    with object_store("s3", "rows") as found:
        with found.filesystem.open_output_stream("rows/a/one.jsonl") as file:
            file.write(b"{}")
        uri = f"s3://key:word@rows/a/*.jsonl?{found.options}"
        assert expand_sources([uri]) == [uri.replace("*", "one")]


def test_the_rows_are_those_of_local_files(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    local = list(read_conversations(tmp_path / "one.jsonl"))
    for path in expand_sources([store.uri("rows/a"), store.uri("rows/b")]):
        remote = list(read_conversations(path))
        assert [row.messages for row in remote] == [row.messages for row in local] and len(remote) == 7
        assert [row.row_id.rpartition(":")[2] for row in remote] == [row.row_id.rpartition(":")[2] for row in local]


def test_texts_of_every_format_are_read_by_audit_lens_and_training(store: ObjectStore) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("lm_eval")
    from aarlib.runtime.documents import domain_documents
    from aarlib.runtime.text_corpus import documents_of, find_texts
    from aarlib.training.config import DataConfig

    pattern = store.uri("rows/t/*")
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
        split = [row.text for row in domain_documents(f"wikitext:{store.uri(f'rows/t/{name}')}", "x")]
        assert split == articles
    with pytest.raises(ValueError, match=r"x: '.*rows/none/\*\?.*names no"):
        list(domain_documents(store.uri("rows/none/*"), "x"))
    with pytest.raises(ValueError, match="gone.txt.*cannot be read"):
        list(read_documents(store.uri("rows/t/gone.txt")))
