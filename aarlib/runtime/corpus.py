"""Conversations to encoded rows with Ray Data: sources -> sample -> tokenise and mask -> held-out split -> order.

Global batch k of (seed, epoch) is rows k*G .. (k+1)*G-1 of the training rows sorted by sha256(seed, epoch, row_id): the same rows
for any number of workers, files or blocks. The driver holds block references only, never rows.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from ray.data.dataset import Dataset, MaterializedDataset

from aarlib.data.chat import Conversation, Encoded, encode
from aarlib.data.sampling import in_fraction, row_hash
from aarlib.data.sources import expand_sources
from aarlib.training.config import DataConfig, ModelConfig

logger = logging.getLogger("aarlib")

ROWS_PER_BLOCK = 1024


class Corpus(NamedTuple):
    encoded: MaterializedDataset
    """Every sampled row: row_id, input_ids, target_mask, num_targets, truncated, held_out; in order of the sources."""
    held_out: MaterializedDataset
    """The held-out rows with targets, ordered by hash."""
    num_train: int
    num_held_out: int
    num_train_targets: int
    num_truncated: int


def find_sources(train: tuple[str, ...]) -> list[str]:
    """Every `nano:<split>:<rows>` source and every file the globs name; a ValueError for one that names nothing."""
    nano = [pattern for pattern in train if pattern.startswith("nano:")]
    for pattern in nano:
        _parse_nano(pattern)
    files = [pattern for pattern in train if not pattern.startswith("nano:")]
    return nano + [str(path) for path in expand_sources(files)]


def build_corpus(model: ModelConfig, data: DataConfig) -> Corpus:
    """Read, sample, tokenise and split; a ValueError before any worker starts if nothing is left to train or evaluate on."""
    sources = find_sources(data.train)
    quiet_ray_data()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    conversations = ray.data.from_items(
        [{"source": source} for source in sources], override_num_blocks=len(sources)
    ).map_batches(read_source, batch_size=1, fn_kwargs={"on_bad_row": data.on_bad_row, "sample": data.sample})
    encoded = (
        conversations.repartition(target_num_rows_per_block=ROWS_PER_BLOCK)
        .map_batches(
            encode_batch,
            batch_size=None,
            batch_format="pyarrow",
            fn_kwargs={
                "model": model.model_dump(mode="json"),
                "sequence_length": data.sequence_length,
                "held_out": data.held_out,
                "on_bad_row": data.on_bad_row,
            },
        )
        .materialize()
    )
    held_out = _by_hash(encoded, "held_out_order", held_out=True)
    if data.max_held_out is not None:
        held_out = held_out.limit(data.max_held_out)
    totals = pd.DataFrame(encoded.map_batches(_totals, batch_size=None, batch_format="pyarrow").take_all()).sum()
    if totals["rows"] == 0:
        raise ValueError(
            f"data.train = {list(data.train)}: no conversation left with data.sample = {data.sample}; raise the sample"
        )
    held_out = held_out.materialize()
    corpus = Corpus(
        encoded,
        held_out,
        num_train=int(totals["train"]),
        num_held_out=held_out.count(),
        num_train_targets=int(totals["train_targets"]),
        num_truncated=int(totals["truncated"]),
    )
    _check(corpus, data)
    logger.info(
        "%d conversations to train on (%d target tokens), %d held out, %d truncated at %d tokens",
        corpus.num_train, corpus.num_train_targets, corpus.num_held_out, corpus.num_truncated, data.sequence_length,
    )  # fmt: skip
    return corpus


def ordered(corpus: Corpus, seed: int, epoch: int) -> MaterializedDataset:
    """The training rows in the order in which (seed, epoch) sees them."""
    return _by_hash(corpus.encoded, f"{seed}/{epoch}", held_out=False).materialize()


def quiet_ray_data() -> None:
    """No progress bars and no line per execution; warnings stay."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)


def _check(corpus: Corpus, data: DataConfig) -> None:
    if corpus.num_train == 0:
        raise ValueError(
            f"data.held_out = {data.held_out} leaves no conversation to train on; lower it or give more data"
        )
    if corpus.num_train_targets == 0:
        raise ValueError(
            f"data.train = {list(data.train)}: no training row has a target token within data.sequence_length = "
            f"{data.sequence_length}; lengthen the sequence or check that the conversations have assistant turns"
        )
    if corpus.num_held_out < 2:
        raise ValueError(
            f"data.held_out = {data.held_out} leaves {corpus.num_held_out} conversations to evaluate on; at least 2 are needed"
        )


def read_source(batch: Mapping[str, Any], on_bad_row: str, sample: float) -> Iterator[dict[str, list[str]]]:
    """The sampled conversations of one source as JSON, `ROWS_PER_BLOCK` at a time."""
    rows = (
        row for row in _conversations(str(batch["source"][0]), on_bad_row) if in_fraction(row.row_id, sample, "sample")
    )
    empty = True
    while part := list(islice(rows, ROWS_PER_BLOCK)):
        empty = False
        yield {"row_id": [row.row_id for row in part], "conversation": [_to_json(row) for row in part]}
    if empty:
        yield {"row_id": [], "conversation": []}


def encode_batch(
    table: pa.Table, model: dict[str, Any], sequence_length: int, held_out: float, on_bad_row: str
) -> pa.Table:
    """Token ids and target masks of a block of conversations."""
    tokenizer = _tokenizer(json.dumps(model, sort_keys=True))
    rows: list[Encoded] = []
    for text in table.column("conversation").to_pylist():
        try:
            rows.append(encode(tokenizer, Conversation(**json.loads(text)), sequence_length))
        except ValueError as error:
            if on_bad_row == "error":
                raise
            logger.warning("skipped: %s", error)
    return pa.table(
        {
            "row_id": pa.array([row.row_id for row in rows], pa.string()),
            "input_ids": pa.array([row.input_ids for row in rows], pa.list_(pa.int32())),
            "target_mask": pa.array([row.target_mask for row in rows], pa.list_(pa.bool_())),
            "num_targets": pa.array([row.num_targets for row in rows], pa.int64()),
            "truncated": pa.array([int(row.truncated) for row in rows], pa.int64()),
            "held_out": pa.array([in_fraction(row.row_id, held_out, "held_out") for row in rows], pa.bool_()),
        }
    )


def _by_hash(encoded: Dataset, salt: str, held_out: bool) -> Dataset:
    """The held-out rows with targets, or all others, sorted by a hash of salt and row id."""
    fn_kwargs = {"salt": salt, "held_out": held_out}
    keyed = encoded.map_batches(_with_key, batch_size=None, batch_format="pyarrow", fn_kwargs=fn_kwargs)
    return keyed.sort(["key", "row_id"])


def _with_key(table: pa.Table, salt: str, held_out: bool) -> pa.Table:
    chosen = table.column("held_out")
    chosen = pc.and_(chosen, pc.greater(table.column("num_targets"), 0)) if held_out else pc.invert(chosen)
    table = table.filter(chosen).select(["row_id", "input_ids", "target_mask"])
    keys = [row_hash(row_id, salt) - (1 << 63) for row_id in table.column("row_id").to_pylist()]
    return table.append_column("key", pa.array(keys, pa.int64()))


def _totals(table: pa.Table) -> pa.Table:
    train = table.filter(pc.invert(table.column("held_out")))
    totals = {
        "rows": table.num_rows,
        "train": train.num_rows,
        "train_targets": pc.sum(train.column("num_targets")).as_py() or 0,
        "truncated": pc.sum(table.column("truncated")).as_py() or 0,
    }
    return pa.table({name: pa.array([value], pa.int64()) for name, value in totals.items()})


@cache
def _tokenizer(model: str) -> Any:
    from aarlib.moe.loading import load_tokenizer

    fields = ModelConfig.from_mapping(json.loads(model))
    return load_tokenizer(fields.name, fields.revision, fields.chat_template)


def _conversations(source: str, on_bad_row: str) -> Iterator[Any]:
    if source.startswith("nano:"):
        from aarlib.nano.world import conversations

        split, rows = _parse_nano(source)
        return iter(conversations(split, rows))
    from aarlib.data.chat import read_conversations

    return read_conversations(source, on_bad_row)


def _parse_nano(source: str) -> tuple[str, int]:
    parts = source.split(":")
    if len(parts) != 3 or not parts[1] or not parts[2].isdecimal() or int(parts[2]) == 0:
        raise ValueError(
            f"data.train = {source!r} is not of the form nano:<split>:<number of rows>, such as nano:sft:2000"
        )
    return parts[1], int(parts[2])


def _to_json(conversation: Any) -> str:
    return json.dumps(conversation._asdict())
