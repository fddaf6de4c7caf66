"""Reading rows of the three formats, and refusing what is no conversation with file and line."""

import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aarlib.data.conversations import Conversation, ReadReport, read_conversations

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello \u2028 you"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def write(path, rows):
    data = "".join(f"{row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_json_lines_keep_their_line_numbers_over_blank_lines(tmp_path, name):
    tulu = {"id": "x_1", "messages": TURNS, "source": "ai2-adapt-dev/x"}
    path = write(tmp_path / name, [tulu, "", "  ", {"messages": TURNS}])
    rows = list(read_conversations(path))
    assert rows == [Conversation(f"{name}:1", TURNS, None), Conversation(f"{name}:4", TURNS, None)]


def test_parquet_rows_count_from_one_and_its_nulls_are_no_fields(tmp_path):
    rows = [
        {"id": str(index), "messages": [{**message, "tool_calls": None} for message in TURNS], "source": "s"}
        for index in range(600)
    ]
    rows[599]["messages"] = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = list(read_conversations(str(tmp_path / "rows.parquet")))
    assert len(read) == 600
    assert read[0] == Conversation("rows.parquet:1", TURNS, None)
    assert read[599] == ("rows.parquet:600", [{"role": "assistant", "content": "", "tool_calls": [CALL]}], None)


def test_tools_and_call_arguments_may_be_json_text(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    path = write(tmp_path / "rows.jsonl", [{"messages": messages, "tools": json.dumps([{"name": "add"}])}])
    (row,) = read_conversations(path)
    assert row.messages == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert row.tools == [{"name": "add"}]


BAD = {
    "{": "not JSON",
    "[1]": "a list, not an object with messages",
    '{"text": "a"}': r"`messages` must be a list of at least one message \(keys here: text\)",
    '{"messages": []}': "must be a list of at least one message",
    '{"messages": ["a"]}': r"messages\[0\] is a str, not an object",
    '{"messages": [{"role": "human", "content": "a"}]}': r"messages\[0\].role = 'human' is not one of system, user",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': r"messages\[0\] holds half of a surrogate pair",
    '{"messages": [{"role": "user"}]}': r"messages\[0\].content is a NoneType, not text",
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}': r"messages\[0\].content is a list, not text",
    '{"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}': "must be a list in an assistant message",
    '{"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}': "each call needs a function with a name",
    '{"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}': "`tools` must be a list of JSON schemas",
}


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=range(len(BAD)))
def test_a_row_that_is_no_conversation_is_named_by_file_and_line(tmp_path, line, message):
    path = write(tmp_path / "rows.jsonl", [{"messages": TURNS}, "", line])
    with pytest.raises(
        ValueError, match=rf'rows.jsonl:3: .*{message}.*; repair the row or set data.on_bad_row = "skip"'
    ):
        list(read_conversations(path))


def test_invalid_utf8_is_a_bad_row_too(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(ValueError, match="rows.jsonl:1: not JSON"):
        list(read_conversations(tmp_path / "rows.jsonl"))


def test_skipped_rows_are_counted_reported_and_logged(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [*BAD, {"messages": TURNS}])
    report = ReadReport()
    with caplog.at_level(logging.WARNING, logger="aarlib"):
        rows = list(read_conversations(path, on_bad_row="skip", report=report))
    assert [row.row_id for row in rows] == [f"rows.jsonl:{len(BAD) + 1}"]
    assert (report.rows, report.skipped, len(report.examples)) == (len(BAD) + 1, len(BAD), 5)
    assert "rows.jsonl:1: not JSON" in report.examples[0]
    assert f"skipped {len(BAD)} of {len(BAD) + 1} rows" in caplog.text
    list(read_conversations(path, on_bad_row="skip", report=report))
    assert report.skipped == 2 * len(BAD)


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_file_that_cannot_be_read_raises_even_when_bad_rows_are_skipped(tmp_path, on_bad_row):
    whole = write(tmp_path / "whole.jsonl.gz", [{"messages": TURNS, "n": str(i)} for i in range(3000)]).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cut.jsonl.gz: cannot be read after line .*; is the file complete"):
        list(read_conversations(tmp_path / "cut.jsonl.gz", on_bad_row))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match="bad.parquet: not a readable parquet file"):
        list(read_conversations(tmp_path / "bad.parquet", on_bad_row))
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(ValueError, match=r"text.parquet: no column `messages` \(columns: text\)"):
        list(read_conversations(tmp_path / "text.parquet", on_bad_row))
    with pytest.raises(ValueError, match="none.jsonl: cannot be read after line 0"):
        list(read_conversations(tmp_path / "none.jsonl", on_bad_row))
    with pytest.raises(ValueError, match="rows.csv: not a .parquet, .jsonl, .jsonl.gz file; convert it"):
        list(read_conversations(tmp_path / "rows.csv", on_bad_row))


def test_real_conversations_are_read_whole(shared_data):
    gsm8k = list(read_conversations(shared_data / "sft/gsm8k_train_chat.jsonl.gz"))
    assert len(gsm8k) == 7473
    assert gsm8k[-1].row_id == "gsm8k_train_chat.jsonl.gz:7473"
    glaive = list(read_conversations(shared_data / "sft/glaive_toolcall_chat.jsonl"))
    assert len(glaive) == 300
    assert {message["role"] for row in glaive for message in row.messages} == {"system", "user", "assistant", "tool"}
