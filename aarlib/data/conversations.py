"""Reading conversations: parquet, .jsonl and .jsonl.gz files of rows {"messages": [{"role", "content", ...}], ...}."""

import io
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

logger = logging.getLogger("aarlib")

FORMATS = (".parquet", ".jsonl", ".jsonl.gz")
ROLES = ("system", "user", "assistant", "tool")
OnBadRow = Literal["error", "skip"]
_EXAMPLES_KEPT = 5


class Conversation(NamedTuple):
    row_id: str
    """`<file name>:<row>`, rows counted from 1 (of a JSONL file: its line)."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass
class ReadReport:
    """What a reader met so far; pass one to several reads to add up."""

    rows: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    """The first few reasons for skipping, each with file and line."""

    def skip(self, problem: str) -> None:
        self.skipped += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(problem)


def read_conversations(
    path: str | PathLike[str], on_bad_row: OnBadRow = "error", report: ReadReport | None = None
) -> Iterator[Conversation]:
    """Stream the conversations of one file or URI (s3://, gs://).

    Other columns (Tulu-3's `id` and `source`) are ignored and blank lines of JSONL are passed over. A row that is no
    conversation raises a ValueError with file and line, or with "skip" is counted in `report` and in the log. A file
    that cannot be read at all (corrupt, another format) always raises.
    """
    report = ReadReport() if report is None else report
    rows_before, skipped_before = report.rows, report.skipped
    path = fspath(path)
    name = file_name(path)
    for number, row in _rows(path):
        report.rows += 1
        try:
            conversation = parse_conversation(row, row_id=f"{name}:{number}")
        except ValueError as error:
            problem = f"{path}:{number}: {error}"
            if on_bad_row == "error":
                raise ValueError(f'{problem}; repair the row or set data.on_bad_row = "skip"') from None
            report.skip(problem)
            continue
        yield conversation
    skipped = report.skipped - skipped_before
    if skipped:
        logger.warning("%s: skipped %d of %d rows that are no conversation", path, skipped, report.rows - rows_before)


def parse_conversation(row: Any, row_id: str) -> Conversation:
    """One row as a Conversation; ValueError says what is wrong with it. A JSON line comes as undecoded bytes."""
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}, not an object with messages")
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        keys = ", ".join(sorted(row)) or "none"
        raise ValueError(f"no conversation: `messages` must be a list of at least one message (keys here: {keys})")
    return Conversation(row_id, [_message(message, index) for index, message in enumerate(messages)], _tools(row))


def _message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"messages[{index}] is a {type(message).__name__}, not an object with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"messages[{index}].role = {role!r} is not one of {', '.join(ROLES)}")
    calls = _decoded(message.get("tool_calls"))
    if not calls:
        message.pop("tool_calls", None)
    elif role != "assistant" or not isinstance(calls, list):
        raise ValueError(f"messages[{index}].tool_calls must be a list in an assistant message")
    else:
        message["tool_calls"] = [_tool_call(call, index) for call in calls]
    content = message.setdefault("content", "" if calls else None)
    if not isinstance(content, str):
        raise ValueError(f"messages[{index}].content is a {type(content).__name__}, not text")
    try:
        json.dumps(message, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise ValueError(f"messages[{index}] holds half of a surrogate pair, which is no Unicode text") from None
    return message


def _tool_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call with its arguments as an object, the form chat templates expect; tables store them as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"messages[{index}].tool_calls: each call needs a function with a name")
    arguments = _decoded(function.get("arguments", {}))
    function = {**_without_nulls(function), "arguments": arguments}
    return {**_without_nulls(call), "function": function} if "function" in call else function


def _tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = _decoded(row.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("`tools` must be a list of JSON schemas")
    return tools


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _without_nulls(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _rows(path: str) -> Iterator[tuple[int, Any]]:
    """(row number from 1, row) of a file; JSON lines come undecoded."""
    name = file_name(path)
    if name.endswith(".parquet"):
        yield from enumerate(parquet_rows(path, "messages", "tools"), start=1)
    elif name.endswith(FORMATS):
        yield from json_lines(path)
    else:
        raise ValueError(f"{path}: not a {', '.join(FORMATS)} file; convert it")


def json_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of a .jsonl(.gz) file or URI, blank lines left out."""
    number = 0
    try:
        with open_stream(path) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read after line {number}: {error}; is the file complete?") from error


def parquet_rows(path: str, required: str, *optional: str) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file or URI, with these columns."""
    try:
        filesystem, inner = open_location(path)
        with pq.ParquetFile(inner, filesystem=filesystem) as file:
            names = file.schema_arrow.names
            if required not in names:
                raise ValueError(f"{path}: no column `{required}` (columns: {', '.join(names)})")
            columns = [required, *(name for name in optional if name in names)]
            for batch in file.iter_batches(batch_size=256, columns=columns):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: not a readable parquet file: {error}") from error


def open_stream(path: str) -> io.BufferedReader:
    """The bytes of a local file or URI, those of a .gz unpacked."""
    filesystem, inner = open_location(path)
    compression = "gzip" if inner.endswith(".gz") else None
    return io.BufferedReader(filesystem.open_input_stream(inner, compression=compression))


def open_location(path: str) -> tuple[pafs.FileSystem, str]:
    """The file system of a local path or URI, and the path inside it."""
    if "://" in path:
        return pafs.FileSystem.from_uri(path)
    return pafs.LocalFileSystem(), path


def file_name(path: str) -> str:
    """The last part of a local path or of a URI, its options left out."""
    return (path.partition("?")[0] if "://" in path else path).rsplit("/", 1)[-1]
