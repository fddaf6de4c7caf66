"""Sources to rows of token ids and target masks, block by block: what Ray Data's tasks do with conversations."""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pyarrow as pa

from aarlib.data.chat import Conversation, Encoded, encode
from aarlib.data.conversations import OnBadRow, ReadReport
from aarlib.data.sampling import in_fraction
from aarlib.data.sources import parse_nano
from aarlib.training.config import ModelConfig

ROWS_PER_BLOCK = 1024
NO_ROW = Encoded("", [], [], False)


def read_source(table: pa.Table, on_bad_row: OnBadRow, sample: float) -> Iterator[pa.Table]:
    """The sampled conversations of the table's sources as JSON, `ROWS_PER_BLOCK` at a time; what was skipped, as problems."""
    for pattern, source in zip(*(table.column(name).to_pylist() for name in ("pattern", "source")), strict=True):
        report = ReadReport()
        rows = (row for row in _conversations(source, on_bad_row, report) if in_fraction(row.row_id, sample, "sample"))
        while part := list(islice(rows, ROWS_PER_BLOCK)):
            yield _as_json(part, pattern)
        problems = [*report.examples, *([""] * (report.skipped - len(report.examples)))]
        yield _as_json([], pattern, problems)


def _as_json(rows: list[Conversation], pattern: int, problems: Sequence[str] = ()) -> pa.Table:
    texts = [json.dumps(row._asdict()) for row in rows]
    size = len(texts) + len(problems)
    return pa.table(
        {
            "pattern": pa.array([pattern] * size, pa.int64()),
            "conversation": pa.array([*texts, *([None] * len(problems))], pa.string()),
            "problem": pa.array([*([None] * len(texts)), *problems], pa.string()),
        }
    )


def encode_batch(
    table: pa.Table, model: dict[str, Any], sequence_length: int, held_out: float, on_bad_row: OnBadRow
) -> pa.Table:
    """Token ids and target masks of a block of conversations; a problem instead where there is none to train on."""
    tokenizer = tokenizer_of(json.dumps(model, sort_keys=True))
    rows: list[Encoded] = []
    problems: list[str | None] = table.column("problem").to_pylist()
    for index, text in enumerate(table.column("conversation").to_pylist()):
        row = NO_ROW
        try:
            row = row if text is None else encode(tokenizer, Conversation(**json.loads(text)), sequence_length)
        except ValueError as error:
            if on_bad_row == "error":
                raise
            problems[index] = str(error)
        rows.append(row)
    return pa.table(
        {
            "pattern": table.column("pattern"),
            "problem": pa.array(problems, pa.string()),
            "row_id": pa.array([row.row_id for row in rows], pa.string()),
            "input_ids": pa.array([row.input_ids for row in rows], pa.list_(pa.int32())),
            "target_mask": pa.array([row.target_mask for row in rows], pa.list_(pa.bool_())),
            "num_targets": pa.array([row.num_targets for row in rows], pa.int64()),
            "truncated": pa.array([int(row.truncated) for row in rows], pa.int64()),
            "held_out": pa.array([in_fraction(row.row_id, held_out, "held_out") for row in rows], pa.bool_()),
        }
    )


@cache
def tokenizer_of(model: str) -> Any:
    from aarlib.moe.loading import load_tokenizer

    fields = ModelConfig.from_mapping(json.loads(model))
    return load_tokenizer(fields.name, fields.revision, fields.chat_template)


def _conversations(source: str, on_bad_row: OnBadRow, report: ReadReport) -> Iterator[Any]:
    if source.startswith("nano:"):
        from aarlib.nano.world import conversations

        split, rows = parse_nano(source)
        return iter(conversations(split, rows))
    from aarlib.data.chat import read_conversations

    return read_conversations(source, on_bad_row, report)
