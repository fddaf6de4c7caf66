"""Conversations to encoded rows with Ray Data: sources -> sample -> tokenise and mask -> held-out split -> order.

Global batch k of (seed, epoch) is rows k*G .. (k+1)*G-1 of the training rows sorted by sha256(seed, epoch, row_id): the same rows
for any number of workers, files or blocks. The driver holds block references only, never rows.
"""

import json
import logging
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import ray.data
from ray.data.dataset import Dataset, MaterializedDataset
from ray.exceptions import RayTaskError

from aarlib.data.chat import Conversation, Encoded, encode
from aarlib.data.conversations import OnBadRow
from aarlib.data.sampling import in_fraction, row_hash
from aarlib.data.sources import expand_sources
from aarlib.runtime.cluster import user_error
from aarlib.training.config import DataConfig, ModelConfig

logger = logging.getLogger("aarlib")

ROWS_PER_BLOCK = 1024
TOTALS = ("rows", "train", "train_targets", "truncated")


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
    try:
        encoded = _encoded(model, data).materialize()
    except RayTaskError as error:
        raise user_error(error) from error
    blocks = _map(encoded, _totals).take_all()
    totals = {name: sum(int(block[name]) for block in blocks) for name in TOTALS}
    if totals["rows"] == 0:
        raise ValueError(
            f"data.train = {list(data.train)}: no conversation left with data.sample = {data.sample}; raise the sample"
        )
    held_out = _by_hash(encoded, "held_out_order", held_out=True)
    if data.max_held_out is not None:
        held_out = held_out.limit(data.max_held_out)
    held_out = held_out.materialize()
    corpus = Corpus(encoded, held_out, totals["train"], held_out.count(), totals["train_targets"], totals["truncated"])
    _check(corpus, data)
    logger.info(
        "%d conversations to train on (%d target tokens), %d held out, %d truncated at %d tokens",
        corpus.num_train, corpus.num_train_targets, corpus.num_held_out, corpus.num_truncated, data.sequence_length,
    )  # fmt: skip
    return corpus


def ordered(corpus: Corpus, seed: int, epoch: int) -> MaterializedDataset:
    """The training rows in the order in which (seed, epoch) sees them."""
    return _by_hash(corpus.encoded, f"{seed}/{epoch}", held_out=False).materialize()


def _encoded(model: ModelConfig, data: DataConfig) -> Dataset:
    sources = find_sources(data.train)
    quiet_ray_data()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    listed = ray.data.from_items([{"source": source} for source in sources], override_num_blocks=len(sources))
    conversations = _map(listed, read_source, on_bad_row=data.on_bad_row, sample=data.sample)
    return _map(
        conversations.repartition(target_num_rows_per_block=ROWS_PER_BLOCK),
        encode_batch,
        model=model.model_dump(mode="json"),
        sequence_length=data.sequence_length,
        held_out=data.held_out,
        on_bad_row=data.on_bad_row,
    )


def _map(dataset: Dataset, fn: Callable[..., Any], **settings: Any) -> Dataset:
    """`fn` over whole blocks as Arrow tables."""
    return dataset.map_batches(fn, batch_size=None, batch_format="pyarrow", fn_kwargs=settings)


def quiet_ray_data() -> None:
    """No progress bars and no line per execution; warnings stay."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)


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


def read_source(table: pa.Table, on_bad_row: OnBadRow, sample: float) -> Iterator[pa.Table]:
    """The sampled conversations of the table's sources as JSON, `ROWS_PER_BLOCK` at a time."""
    for source in table.column("source").to_pylist():
        rows = (row for row in _conversations(source, on_bad_row) if in_fraction(row.row_id, sample, "sample"))
        while part := list(islice(rows, ROWS_PER_BLOCK)):
            yield _as_json(part)
    yield _as_json([])


def _as_json(rows: list[Conversation]) -> pa.Table:
    texts = [json.dumps(row._asdict()) for row in rows]
    return pa.table({"conversation": pa.array(texts, pa.string())})


def encode_batch(
    table: pa.Table, model: dict[str, Any], sequence_length: int, held_out: float, on_bad_row: OnBadRow
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
    return _map(encoded, _with_key, salt=salt, held_out=held_out).sort(["key", "row_id"])


def _with_key(table: pa.Table, salt: str, held_out: bool) -> pa.Table:
    is_held_out, num_targets = table["held_out"].to_numpy(), table["num_targets"].to_numpy()
    chosen = is_held_out & (num_targets > 0) if held_out else ~is_held_out
    table = table.filter(pa.array(chosen)).select(["row_id", "input_ids", "target_mask"])
    keys = [row_hash(row_id, salt) - (1 << 63) for row_id in table.column("row_id").to_pylist()]
    return table.append_column("key", pa.array(keys, pa.int64()))


def _totals(table: pa.Table) -> pa.Table:
    train = ~table["held_out"].to_numpy()
    targets, truncated = table["num_targets"].to_numpy(), table["truncated"].to_numpy()
    totals = (len(train), train.sum(), targets[train].sum(), truncated.sum())
    return pa.table({name: pa.array([int(value)]) for name, value in zip(TOTALS, totals, strict=True)})


@cache
def _tokenizer(model: str) -> Any:
    from aarlib.moe.loading import load_tokenizer

    fields = ModelConfig.from_mapping(json.loads(model))
    return load_tokenizer(fields.name, fields.revision, fields.chat_template)


def _conversations(source: str, on_bad_row: OnBadRow) -> Iterator[Any]:
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
