"""Conversations to encoded rows with Ray Data: sources -> sample -> tokenise and mask -> held-out split -> order.

Global batch k of (seed, epoch) is rows k*G .. (k+1)*G-1 of the training rows sorted by sha256(seed, epoch, row_id): the same rows
for any number of workers, files or blocks. The driver holds block references only, never rows.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray.data
from ray.data.dataset import Dataset, MaterializedDataset
from ray.exceptions import RayTaskError

from aarlib.data.sampling import row_hash
from aarlib.data.sources import find_sources
from aarlib.runtime.encoding import ROWS_PER_BLOCK, encode_batch, read_source
from aarlib.runtime.failures import user_error
from aarlib.training.config import DataConfig, ModelConfig

logger = logging.getLogger("aarlib")

TOTALS = ("rows", "train", "train_targets", "truncated", "skipped", "digest")
EXAMPLES_KEPT = 5
MIXTURE = "mixture"
DIGESTS = 1 << 62


class Corpus(NamedTuple):
    encoded: MaterializedDataset
    """Every sampled row: row_id, input_ids, target_mask, num_targets, truncated, held_out, pattern (index in data.train), and for
    a row that was skipped only `problem`; in order of the sources."""
    held_out: MaterializedDataset
    """The held-out rows with targets, ordered by hash."""
    num_train: int
    num_held_out: int
    num_train_targets: int
    num_truncated: int
    num_skipped: int = 0
    skipped: tuple[str, ...] = ()
    """The first few reasons, each with file and line where it has them."""
    digest: str = ""
    """Of the ids and tokens of every row, whatever their order; another where a file has changed."""

    def record(self) -> dict[str, Any]:
        """For the run directory: what was trained and evaluated on."""
        counts = {name: value for name, value in self._asdict().items() if name.startswith("num_")}
        return {**counts, "skipped": list(self.skipped), "digest": self.digest}


def build_corpus(model: ModelConfig, data: DataConfig) -> Corpus:
    """Read, sample, tokenise and split; a ValueError before any worker starts if nothing is left to train or evaluate on."""
    try:
        encoded = _encoded(model, data).materialize()
    except RayTaskError as error:
        raise user_error(error) from error
    if data.proportions is not None:
        encoded = map_blocks(encoded, _in_mixture, largest=_mixture(encoded, data)).materialize()
    blocks = map_blocks(encoded, _totals).take_all()
    totals = {name: sum(int(block[name]) for block in blocks) for name in TOTALS}
    if totals["rows"] == 0:
        raise ValueError(
            f"data.train = {list(data.train)}: no conversation left with data.sample = {data.sample}; raise the sample"
        )
    held_out = by_hash(encoded, "held_out_order", held_out=True)
    if data.max_held_out is not None:
        held_out = held_out.limit(data.max_held_out)
    held_out = held_out.materialize()
    corpus = Corpus(
        encoded, held_out, totals["train"], held_out.count(), totals["train_targets"], totals["truncated"],
        totals["skipped"], tuple(text for block in blocks for text in block["problems"])[:EXAMPLES_KEPT],
        digest_text(totals["digest"]),
    )  # fmt: skip
    _check(corpus, data)
    if corpus.num_skipped:
        logger.warning("%d rows skipped, the first: %s", corpus.num_skipped, corpus.skipped[0])
    logger.info(
        "%d conversations to train on (%d target tokens), %d held out, %d truncated at %d tokens",
        corpus.num_train, corpus.num_train_targets, corpus.num_held_out, corpus.num_truncated, data.sequence_length,
    )  # fmt: skip
    return corpus


def ordered(corpus: Corpus, seed: int, epoch: int) -> MaterializedDataset:
    """The training rows in the order in which (seed, epoch) sees them."""
    return by_hash(corpus.encoded, f"{seed}/{epoch}", held_out=False).materialize()


def _encoded(model: ModelConfig, data: DataConfig) -> Dataset:
    find_sources(data.train)
    first_pattern: dict[str, int] = {}
    for index, pattern in enumerate(data.train):
        for source in find_sources((pattern,)):
            first_pattern.setdefault(source, index)
    sources = [{"pattern": index, "source": source} for source, index in first_pattern.items()]
    quiet_ray_data()
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    listed = ray.data.from_items(sources, override_num_blocks=len(sources))
    conversations = map_blocks(listed, read_source, on_bad_row=data.on_bad_row, sample=data.sample)
    return map_blocks(
        conversations.repartition(target_num_rows_per_block=ROWS_PER_BLOCK),
        encode_batch,
        model=model.model_dump(mode="json"),
        sequence_length=data.sequence_length,
        held_out=data.held_out,
        on_bad_row=data.on_bad_row,
    )


def map_blocks(dataset: Dataset, fn: Callable[..., Any], **settings: Any) -> Dataset:
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


def by_hash(encoded: Dataset, salt: str, held_out: bool) -> Dataset:
    """The held-out rows with targets, or all others, sorted by a hash of salt and row id."""
    return map_blocks(encoded, _with_key, salt=salt, held_out=held_out).sort(["key", "row_id"])


def _with_key(table: pa.Table, salt: str, held_out: bool) -> pa.Table:
    chosen = _is_held_out(table) & (table["num_targets"].to_numpy() > 0) if held_out else _is_train(table)
    table = table.filter(pa.array(chosen)).select(["row_id", "input_ids", "target_mask"])
    return table.append_column("key", pa.array(_keys(table, salt), pa.int64()))


def _is_good(table: pa.Table) -> Any:
    return table.column("problem").is_null().to_numpy()


def _is_held_out(table: pa.Table) -> Any:
    return _is_good(table) & table["held_out"].to_numpy()


def _is_train(table: pa.Table) -> Any:
    return _is_good(table) & ~table["held_out"].to_numpy()


def _keys(table: pa.Table, salt: str) -> list[int]:
    return [row_hash(row_id, salt) - (1 << 63) for row_id in table.column("row_id").to_pylist()]


def _totals(table: pa.Table) -> pa.Table:
    train, good = _is_train(table), _is_good(table)
    targets, truncated = table["num_targets"].to_numpy(), table["truncated"].to_numpy()
    totals = (good.sum(), train.sum(), targets[train].sum(), truncated[good].sum(), (~good).sum(), digest(table))
    problems = [text for text in table.column("problem").to_pylist() if text]
    columns = {name: pa.array([int(value)]) for name, value in zip(TOTALS, totals, strict=True)}
    return pa.table({**columns, "problems": pa.array([problems[:EXAMPLES_KEPT]], pa.list_(pa.string()))})


def digest(table: pa.Table) -> int:
    """A sum of hashes, one a row, modulo 2^62: blocks may come in any order and number."""
    rows = zip(*(table.column(name).to_pylist() for name in ("row_id", "input_ids", "target_mask")), strict=True)
    return sum(row_hash(f"{row_id} {ids} {mask}", "digest") for row_id, ids, mask in rows) % DIGESTS


def digest_text(total: int) -> str:
    """Of the sum of the blocks' digests."""
    return f"{total % DIGESTS:016x}"


def _mixture(encoded: Dataset, data: DataConfig) -> list[int]:
    """Per pattern of data.train the largest key kept: the training rows become the largest set with these proportions."""
    assert data.proportions is not None
    blocks = list(map_blocks(encoded, _mixture_keys).iter_batches(batch_size=None, batch_format="numpy"))
    patterns, keys = (np.concatenate([block[name] for block in blocks]) for name in ("pattern", "key"))
    shares = [share / sum(data.proportions) for share in data.proportions]
    found = [keys[patterns == index] for index in range(len(shares))]
    total = min(len(some) / share for some, share in zip(found, shares, strict=True))
    counts = [min(len(some), round(total * share)) for some, share in zip(found, shares, strict=True)]
    if 0 in counts:
        raise ValueError(
            f"data.proportions = {list(data.proportions)}: {list(data.train)} have {[len(some) for some in found]} rows to train "
            "on, of which that leaves none of one; change the proportions or give more data"
        )
    logger.info("mixture: %s rows of %s", counts, list(data.train))
    return [int(np.partition(some, count - 1)[count - 1]) for some, count in zip(found, counts, strict=True)]


def _mixture_keys(table: pa.Table) -> pa.Table:
    table = table.filter(pa.array(_is_train(table)))
    return pa.table({"pattern": table.column("pattern"), "key": pa.array(_keys(table, MIXTURE), pa.int64())})


def _in_mixture(table: pa.Table, largest: list[int]) -> pa.Table:
    """The table without the training rows that the mixture leaves out."""
    limits = np.array(largest)[table["pattern"].to_numpy()]
    return table.filter(pa.array(~_is_train(table) | (np.array(_keys(table, MIXTURE), dtype=np.int64) <= limits)))
