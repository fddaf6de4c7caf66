"""Ingest from a local folder of parquet files, which `datasets` streams as it streams a Hub dataset."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aarlib.data.conversations import read_conversations
from aarlib.data.sources import expand_sources
from aarlib.runtime import ingest as module
from aarlib.runtime.ingest import ingest, read_manifest

NUM_ROWS = 95


def row(number):
    call = {"type": "function", "function": {"name": "add", "arguments": json.dumps({"a": number, "none": None})}}
    messages = [
        {"role": "user", "content": f"question {number}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(number)},
        {"role": "assistant", "content": f"answer \u2028 {number}"},
    ]
    return {"id": f"id_{number}", "messages": messages, "source": "here"}


@pytest.fixture
def hub(tmp_path):
    """A dataset of three files, as a Hub repository holds it."""
    rows = [row(number) for number in range(NUM_ROWS)]
    (tmp_path / "hub/tulu-tiny").mkdir(parents=True)
    for part in range(3):
        pq.write_table(
            pa.Table.from_pylist(rows[part * 40 : (part + 1) * 40]),
            tmp_path / f"hub/tulu-tiny/train-{part:05d}-of-00003.parquet",
        )
    return str(tmp_path / "hub/tulu-tiny")


def test_every_row_arrives_once_and_in_order(hub, tmp_path, caplog):
    pattern = f"{tmp_path}/local/*.parquet"
    with caplog.at_level("INFO", logger="aarlib"):
        manifest = ingest(hub, pattern, rows_per_shard=30)
    assert manifest == read_manifest(tmp_path / "local")
    assert (manifest.complete, manifest.rows, manifest.rows_read, manifest.skipped) == (True, NUM_ROWS, NUM_ROWS, 0)
    assert [shard.rows for shard in manifest.shards] == [30, 30, 30, 5]
    assert "95 rows in 4 shards" in caplog.text
    paths = expand_sources([pattern])
    assert [path.rsplit("/", 1)[-1] for path in paths] == [f"tulu-tiny-{number:05d}.parquet" for number in range(4)]
    rows = [row for path in paths for row in read_conversations(path)]
    assert rows[31].row_id == "tulu-tiny-00001.parquet:2"
    assert [row.messages[3]["content"] for row in rows] == [f"answer \u2028 {number}" for number in range(NUM_ROWS)]
    call = rows[7].messages[1]["tool_calls"][0]
    assert call == {"type": "function", "function": {"name": "add", "arguments": {"a": 7, "none": None}}}
    assert set(rows[7].messages[0]) == {"role", "content"}


class Interrupted(Exception):
    pass


def interrupt_at_shard(monkeypatch, number):
    """Fail after the shard's file is there and before the manifest knows of it."""
    save = module._save
    calls = []

    def interrupted(manifest, folder):
        calls.append(len(manifest.shards))
        if len(manifest.shards) == number:
            raise Interrupted
        save(manifest, folder)

    monkeypatch.setattr(module, "_save", interrupted)


def test_an_interrupted_ingest_resumes_and_equals_an_uninterrupted_one(hub, tmp_path, monkeypatch):
    whole = ingest(hub, f"{tmp_path}/whole/*.parquet", rows_per_shard=20)
    pattern = f"{tmp_path}/resumed/*.parquet"
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        interrupt_at_shard(patch, 3)
        ingest(hub, pattern, rows_per_shard=20)
    halfway = read_manifest(tmp_path / "resumed")
    assert halfway is not None
    assert (halfway.complete, halfway.rows_read) == (False, 40)
    first = tmp_path / "resumed/tulu-tiny-00000.parquet"
    written = first.stat().st_mtime_ns
    resumed = ingest(hub, pattern, rows_per_shard=20)
    assert resumed == whole
    assert first.stat().st_mtime_ns == written
    assert not list(tmp_path.glob("resumed/.*"))


def test_a_complete_folder_is_left_alone_and_needs_no_dataset(hub, tmp_path):
    pattern = f"{tmp_path}/local/*.parquet"
    manifest = ingest(hub, pattern)
    for path in (tmp_path / "hub/tulu-tiny").iterdir():
        path.unlink()
    assert ingest(hub, pattern) == manifest


def test_rows_that_are_no_conversation_stop_or_are_counted(tmp_path):
    (tmp_path / "bad").mkdir()
    rows = [row(number) for number in range(10)]
    rows[4]["messages"] = []
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad/train.parquet")
    hub, pattern = str(tmp_path / "bad"), f"{tmp_path}/local/*.parquet"
    with pytest.raises(ValueError, match=r"data.hub = '.*bad', row 5: no conversation.*data.on_bad_row = \"skip\""):
        ingest(hub, pattern)
    assert not (tmp_path / "local").exists()
    manifest = ingest(hub, pattern, on_bad_row="skip", rows_per_shard=3)
    assert (manifest.rows, manifest.rows_read, manifest.skipped) == (9, 10, 1)
    assert [shard.rows for shard in manifest.shards] == [3, 2, 3, 1]


def test_what_the_folder_holds_is_never_overwritten(hub, tmp_path):
    pattern = f"{tmp_path}/local/*.parquet"
    (tmp_path / "local").mkdir()
    (tmp_path / "local/mine.parquet").write_bytes(b"mine")
    with pytest.raises(ValueError, match="holds parquet files but no manifest.json; remove data.hub to use them"):
        ingest(hub, pattern)
    (tmp_path / "local/mine.parquet").unlink()
    ingest(hub, pattern)
    with pytest.raises(
        ValueError, match=r"local holds '.*tulu-tiny' \(train\), not 'other/thing' \(train\); name another"
    ):
        ingest("other/thing", f"{tmp_path}/local/*")
    shard = tmp_path / "local/tulu-tiny-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="tulu-tiny-00000.parquet is missing or changed since it was ingested"):
        ingest(hub, pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("s3://bucket/rows/*.parquet", "is no local folder to ingest into"),
        ("data/**/*.parquet", "is no local folder to ingest into"),
        ("data/rows/*.jsonl", "would not find the shards tulu-tiny-00000.parquet"),
    ],
)
def test_a_pattern_that_cannot_be_filled_is_refused_first(hub, pattern, message):
    with pytest.raises(ValueError, match=message):
        ingest(hub, pattern)


def test_an_unreachable_dataset_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="data.hub = 'none/such' is not reached: .*put files where data.train looks"):
        ingest("none/such", f"{tmp_path}/local/*.parquet")
    assert not (tmp_path / "local").exists()


def test_a_dataset_that_is_a_script_is_refused(tmp_path):
    (tmp_path / "scripted").mkdir()
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit")
    with pytest.raises(
        ValueError, match="data.hub = .*scripted' is not reached: Dataset scripts are no longer supported"
    ):
        ingest(str(tmp_path / "scripted"), f"{tmp_path}/local/*.parquet")
    assert not (tmp_path / "local").exists()


def test_plain_text_is_ingested_by_column_and_up_to_a_number_of_rows(tmp_path):
    (tmp_path / "hub/ptb-tiny").mkdir(parents=True)
    rows = [{"sentence": f"line {number}"} for number in range(30)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub/ptb-tiny/train-00000-of-00001.parquet")
    dataset, pattern = str(tmp_path / "hub/ptb-tiny"), f"{tmp_path}/local/*.parquet"
    settings = {"rows_per_shard": 8, "max_rows": 20}
    with pytest.raises(ValueError, match=r"no string under 'text' \(columns: sentence\); set hub_column"):
        ingest(dataset, pattern, text_column="text", **settings)
    manifest = ingest(dataset, pattern, text_column="sentence", **settings)
    assert [shard.rows for shard in manifest.shards] == [8, 8, 4]
    texts = [row["text"] for path in expand_sources([pattern]) for row in pq.read_table(path).to_pylist()]
    assert texts == [f"line {number}" for number in range(20)]
    assert ingest(dataset, pattern, text_column="sentence", **settings) == manifest
    with pytest.raises(ValueError, match="with max_rows = 20, not 21; name another folder"):
        ingest(dataset, pattern, text_column="sentence", rows_per_shard=8, max_rows=21)


def test_rows_of_the_parquet_branch_of_a_script_dataset(tmp_path):
    """Its layout: one folder a configuration, one a split."""
    for split in ("train", "test"):
        (tmp_path / "ptb/penn_treebank" / split).mkdir(parents=True)
        rows = pa.Table.from_pylist([{"sentence": f"{split} {number}"} for number in range(5)])
        pq.write_table(rows, tmp_path / "ptb/penn_treebank" / split / "0000.parquet")
    pattern = f"{tmp_path}/local/*.parquet"
    ingest(str(tmp_path / "ptb"), pattern, "test", text_column="sentence", revision="refs/convert/parquet")
    assert pq.read_table(tmp_path / "local/ptb-00000.parquet")["text"].to_pylist() == [f"test {i}" for i in range(5)]


def test_the_revision_that_is_asked_for_is_the_one_that_is_resolved(monkeypatch):
    """Against a server of the Hub's interface on this machine."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = json.dumps({"id": "some/thing", "sha": "c0ffee" if "refs%2Fconvert" in self.path else "main"})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        found = [module._current_revision("some/thing", revision) for revision in ("refs/convert/parquet", None)]
        server.shutdown()
    assert found == ["c0ffee", "main"]
    assert asked == ["/api/datasets/some/thing/revision/refs%2Fconvert%2Fparquet", "/api/datasets/some/thing"]
