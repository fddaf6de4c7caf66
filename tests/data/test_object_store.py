"""Conversations are read from an object store as from a folder: a local S3 server, globs, both formats, options in the URI."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from aarlib.data.conversations import read_conversations
from aarlib.data.sources import expand_sources

server = pytest.importorskip("moto.server")
ROWS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i}"}]} for i in range(7)
]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The options part of URIs to a server that holds bucket `rows`."""
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "none")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "none")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        store = pafs.S3FileSystem(
            endpoint_override=f"{host}:{port}", scheme="http", region="us-east-1", allow_bucket_creation=True
        )
        store.create_dir("rows")
        lines = "\n".join(json.dumps(row) for row in ROWS).encode()
        for name, content in {
            "rows/a/one.jsonl": lines,
            "rows/a/two.jsonl.gz": gzip.compress(lines),
            "rows/a/note.txt": b"no conversation",
        }.items():
            with store.open_output_stream(name, compression=None) as file:
                file.write(content)
        pq.write_table(pa.Table.from_pylist(ROWS), "rows/b/three.parquet", filesystem=store)
        yield f"scheme=http&endpoint_override={host}%3A{port}&region=us-east-1"
    running.stop()


def test_globs_find_the_data_files_and_nothing_else(options: str) -> None:
    found = expand_sources([f"s3://rows/a/*?{options}", f"s3://rows/b/*.parquet?{options}"])
    assert [path.split("?")[0] for path in found] == [
        "s3://rows/a/one.jsonl",
        "s3://rows/a/two.jsonl.gz",
        "s3://rows/b/three.parquet",
    ]
    with pytest.raises(ValueError, match=r"'s3://rows/c/\*\?.*names no"):
        expand_sources([f"s3://rows/c/*?{options}"])


def test_the_rows_are_those_of_local_files(options: str, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    local = list(read_conversations(tmp_path / "one.jsonl"))
    for path in expand_sources([f"s3://rows/a?{options}", f"s3://rows/b?{options}"]):
        remote = list(read_conversations(path))
        assert [row.messages for row in remote] == [row.messages for row in local] and len(remote) == 7
        assert [row.row_id.rpartition(":")[2] for row in remote] == [row.row_id.rpartition(":")[2] for row in local]
